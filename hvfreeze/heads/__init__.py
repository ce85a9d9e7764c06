"""Fitted heads: features of a frozen model, and ridge or logistic regression on them over all ranks."""
