"""The rows of the benchmark: each module has `measure`, which yields rows and which every rank calls.

May import `analysis.benchmarks`.
"""
