"""The local critics strategy: layer groups update at once with the loss that critics predict.

Imports what a strategy may; nothing outside imports anything of it but what `training/parts.py` opens.
"""
