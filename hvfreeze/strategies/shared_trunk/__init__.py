"""Several models on one frozen trunk whose segments lie on different ranks: a strategy, in parts.

Imports what a strategy may; nothing outside imports anything of it but what `training/stage_build.py` opens.
"""
