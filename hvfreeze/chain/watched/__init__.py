"""Models of one's own, whose blocks are found by watching their forward pass, and run inside it.

Imports `errors` and, of its neighbours, `blocks` only.
"""
