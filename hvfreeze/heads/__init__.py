"""Heads that are solved instead of trained: features of a frozen chain, and the convex problem over all ranks.

Imports `errors`, `config`, `chain`, `ranks`, `cache`, `data` and `runs`; never `freezing` or `prefix`.
"""
