"""A finished run's model, applied: its card, predictions and scores."""
