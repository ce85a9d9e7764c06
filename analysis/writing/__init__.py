"""How results are shown: charts, cells of tables, and the study's numbers.

May import `analysis.sweeps`.
"""
