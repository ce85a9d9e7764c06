"""`hvfreeze report`: one HTML page, figures and CSV files from run directories.

Imports `errors`, `config` and `runs` only.
"""
