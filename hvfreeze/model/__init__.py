"""Models as ordered chains of blocks: their sources and weights. Independent of ranks, data and training."""
