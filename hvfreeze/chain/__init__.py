"""A model as an ordered chain of blocks, and where it comes from. Knows no ranks, no data and no training.

Imports `errors`, `torchvision_shim` and `config` only.
"""
