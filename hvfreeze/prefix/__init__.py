"""The frozen prefix's output, read from the cache or computed.

Imports `errors`, `config`, `model`, `comm`, `cache`, `data` and `runs`; never `freezing`.
"""
