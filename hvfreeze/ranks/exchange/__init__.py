"""How gradients are laid out and made small before the reducer sends them.

Imports `errors` and, of its neighbours, `world` only.
"""
