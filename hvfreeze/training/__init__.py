"""The loop, and a run from its configuration to its summary. Only `choice.py` knows strategies by name.

Imports everything below it; only `__main__` imports it.
"""
