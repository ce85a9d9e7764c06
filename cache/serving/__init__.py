"""A batch of training's: read if it is cached, computed and kept if it is not, and what becomes of a cache that fails.

The parts of `PrefixActivations`. Imports `file`, `planning` and `store`.
"""
