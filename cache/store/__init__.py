"""The rows of one fingerprint over all their files, and a cut's rows beside those of shallower cuts.

Imports `file` and the modules of `cache` beside it.
"""
