"""A run as a row of stages: which there are, what is open for the one under way, and what is kept of each."""
