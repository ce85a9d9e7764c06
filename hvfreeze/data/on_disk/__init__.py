"""Data sets as they lie on disk: class folders, and the CIFAR archives."""
