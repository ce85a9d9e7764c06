"""Gradients as matrices of low rank (PowerSGD)."""
