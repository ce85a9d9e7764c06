"""What moves tensors between ranks, and what ranks settle among themselves. Knows no model's structure.

The only folder that imports Horovod or mpi4py. Imports `errors` and `config` only.
"""
