"""Replicas that train alone for some steps, then take their mean: a strategy, in parts."""
