"""One model cut into K modules on a ring of K - 1 ranks, whose gradients are as many steps old as modules lie behind.

Imports what a strategy may; nothing outside imports anything of it but what `training/stage_build.py` opens.
"""
