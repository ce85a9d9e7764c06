"""One HDF5 file of rows: its format, how it is written and published, and how it is verified and read.

The only folder that imports h5py. The datasets of a file and their contents are in docs/internals/cache.md.
"""
