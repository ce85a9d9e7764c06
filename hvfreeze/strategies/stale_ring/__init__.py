"""The stale ring strategy: one model cut into K modules on a ring of K - 1 ranks, trained with delayed gradients.

Imports what a strategy may; nothing outside imports anything of it but what `training/parts.py` opens.
"""
