"""Which rank runs which blocks when, and what crosses between ranks: one file a strategy, all behind one door.

Imports everything but `training`, `report` and `doctor`; a strategy never imports another strategy.
"""
