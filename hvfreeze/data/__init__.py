"""Samples: data sets on disk, who owns which sample, in which order and view, and their pixels. Knows no ranks.

Imports `errors`, `torchvision_shim` and `config` only.
"""
