"""What a run is made of: its model and its samples, and how it is made ready from them."""
