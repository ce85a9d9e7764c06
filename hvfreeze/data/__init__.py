"""Datasets: files on disk, shards, sample order, augmented views and pixels. Nothing here communicates.

Imports `errors`, `files`, `user_code`, `torchvision_shim` and `config` only.
"""
