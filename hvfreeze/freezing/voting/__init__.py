"""From what was observed to the cut: criteria propose, weights say what a rank's proposal counts, the tally decides.

Imports `config` and `ranks`, and nothing else of `freezing`.
"""
