"""Whether and when rows are computed to be kept: what a directory costs, what will be read again, the decision.

Imports `file`, `store` and the modules of `cache` beside it.
"""
