"""The grid strategy: one model cut over the ranks of a pipeline, in several replicas."""
