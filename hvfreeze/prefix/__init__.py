"""The output of the frozen prefix, read from the cache or computed.

Imports `errors`, `config`, `model`, `comm`, `cache`, `data` and `runs`; never `freezing`.
"""
