"""Which of the features a solved head needs."""
