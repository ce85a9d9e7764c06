"""Heads that are solved instead of trained: features of a frozen chain, and the convex problem over all ranks."""
