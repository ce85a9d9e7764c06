"""The grid strategy: one model cut over the ranks of a pipeline, in several replicas.

Imports what a strategy may; nothing outside imports anything of it but what `training/parts.py` opens.
"""
