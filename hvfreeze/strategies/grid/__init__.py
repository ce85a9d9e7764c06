"""One model cut over the ranks of a line, in several replicas: a strategy, in parts.

Imports what a strategy may; nothing outside imports anything of it but what `training/stage_build.py` opens.
"""
