"""Training scripts in plain Horovod, and the same scripts with voted freezing and a cache."""
