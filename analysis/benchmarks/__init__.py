"""What `python -m analysis.bench` measures with: sides that take turns on the same ranks, hand-written references, and
in rows/ a module for every kind of row.

May import nothing else of `analysis`.
"""
