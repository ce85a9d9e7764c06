"""The frozen prefix's output, read from the cache or computed.

Imports `errors`, `config`, `chain`, `ranks`, `cache`, `data` and `runs`; never `freezing`.
"""
