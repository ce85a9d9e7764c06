"""How experiments are run: presets, runs that are kept, their rows and the statistics of these."""
