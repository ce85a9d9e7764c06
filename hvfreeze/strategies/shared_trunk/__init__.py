"""The shared trunk strategy: several models on one frozen trunk, whose segments are on different ranks.

Imports what a strategy may; nothing outside imports anything of it but what `training/parts.py` opens.
"""
