"""Who decides the cut, and what frozen means.

Imports `errors`, `config`, `model`, `comm` and `runs`.
"""
