"""What a run is: sections of settings, the tree that they form, and the flags and files that fill it. No torch.

Imports `errors` only.
"""
