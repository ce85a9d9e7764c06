"""Data sets: what one tells of its samples, and how each that has a name, a folder or code of its own is opened."""
