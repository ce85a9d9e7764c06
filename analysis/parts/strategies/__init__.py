"""The runs of `analysis.strategies` and their evaluation, one file per strategy."""
