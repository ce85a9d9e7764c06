"""Who decides the cut, and what frozen means.

Imports `errors`, `config`, `chain` and `ranks`.
"""
