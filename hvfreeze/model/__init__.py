"""A model as an ordered chain of blocks, its sources and its weights. Knows no ranks, no data and no training."""
