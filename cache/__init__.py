"""Stored activations: the frozen prefix's output, read when it is cached, computed and kept when it is not.

A library of its own, which `hvfreeze/cache` is a link to: imports nothing of hvfreeze but `errors` and `files`.
"""
