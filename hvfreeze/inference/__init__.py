"""Apply a finished run's model: card, predictions, evaluation and export."""
