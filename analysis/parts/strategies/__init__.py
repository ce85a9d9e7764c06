"""What `analysis.strategies` runs, and what it makes of it: a file for each strategy."""
