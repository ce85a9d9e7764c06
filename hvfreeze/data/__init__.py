"""Samples: data sets on disk, who owns which sample, in which order and view, and their pixels. Knows no ranks.

Imports `errors`, `files`, `user_code`, `torchvision_shim` and `config` only.
"""
