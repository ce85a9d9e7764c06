"""What is minimised, and how parameters follow their gradients: the loss, the optimizer, one update.

Imports `errors` and `config` only.
"""
