"""Integration into a training script: a distributed optimizer that freezes by vote, and a caching loader."""
