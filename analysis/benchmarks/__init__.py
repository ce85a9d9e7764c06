"""The parts of `python -m analysis.bench`: sides that take turns on the same ranks, references, and a module per row.

May import nothing else of `analysis`.
"""
