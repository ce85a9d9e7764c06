"""Freezing by vote: criteria, the vote, and the cut of frozen blocks.

Imports `errors`, `config`, `model`, `comm` and `runs`.
"""
