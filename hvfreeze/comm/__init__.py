"""Communication between ranks: worlds, point to point, gradient exchange, watchdogs. Knows no model's structure."""
