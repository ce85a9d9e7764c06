"""Parallelization strategies: which rank runs which blocks, and what ranks send. All implement the interface of `base`.

Imports everything but `training`, `report` and `doctor`; a strategy never imports another strategy.
"""
