"""Layer groups that update at once, by the loss that critics predict: a strategy, in parts.

Imports what a strategy may; nothing outside imports anything of it but what `training/stage_build.py` opens.
"""
