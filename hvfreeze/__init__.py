"""Distributed fine-tuning on CPU nodes in which ranks vote front layers frozen and cache their output."""

__version__ = "0.1.0"
