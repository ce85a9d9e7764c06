"""What a rank knows of its process and its machine: what the launcher said, and its share of cores and memory.

Imports `errors` and, of its neighbours, `world` only.
"""
