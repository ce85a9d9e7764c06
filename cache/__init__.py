"""The activation cache: stores the output of the frozen prefix by sample, and reads it instead of computing it again.

A separate library, which `hvfreeze/cache` links to: it imports nothing of hvfreeze except `errors` and `files`.
"""
