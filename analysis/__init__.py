"""Questions put to hvfreeze, and their answers. Each module here is a command, `python -m analysis.NAME`: experiments
(`experiments` makes all of them), pages and figures of their results (`summary`, `figures`), the benchmark (`bench`),
the demonstration (`demo`), and smaller ones.

May import hvfreeze, which imports nothing from here; inside: benchmarks < sweeps < parts < the commands.
"""
