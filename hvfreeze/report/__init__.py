"""`hvfreeze report` and `hvfreeze runs`: an HTML page with figures and CSV files, and a list of runs."""
