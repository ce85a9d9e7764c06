"""Training runs, from the configuration to the summary. Only `parts.py` refers to strategies by name.

Imports everything below it; only `__main__` and `cli` import it.
"""
