"""The local SGD strategy: replicas train alone for some steps, then average."""
