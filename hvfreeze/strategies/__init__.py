"""Which rank runs which blocks when, and what crosses between ranks: strategies, all with the interface of `base`.

Imports everything but `training`, `report` and `doctor`; a strategy never imports another strategy.
"""
