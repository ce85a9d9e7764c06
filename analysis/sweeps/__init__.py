"""Experiments are made here: presets, runs that are kept, their rows, the statistics of these, and the page that says
what came of it.

May import `analysis.benchmarks.launching`, and nothing else of `analysis`.
"""
