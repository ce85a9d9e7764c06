"""A finished run's model, applied: its card, the way from an image to logits, and what it answers for many images.

Imports `heads`, what lies below it but `ranks` and `cache`, and `report` for figures; `training` writes the card
through it.
"""
