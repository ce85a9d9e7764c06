"""How results are shown: charts, cells of tables, each result's page, and the study's numbers."""
