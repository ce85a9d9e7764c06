"""Which rank runs which blocks when, and what crosses between ranks: a folder a strategy, all behind one door.

Imports everything but `training`, `report` and `doctor`; a strategy never imports another strategy.
"""
