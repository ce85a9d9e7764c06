"""`hvfreeze report`: one HTML page, figures and CSV files from run directories."""
