"""The loop, and a run from its configuration to its summary. Knows no strategy by name.

Imports everything below it; only `__main__` imports it.
"""
