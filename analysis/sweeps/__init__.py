"""Experiments: presets, launching, runs that are kept with their rows, results and statistics, pages and charts.

May import `analysis.benchmarks.launching`, and nothing else of `analysis`.
"""
