"""The loop, and a run from its configuration to its summary. Only `stage_build.py` knows strategies by name.

Imports everything below it; only `__main__` and `cli` import it.
"""
