"""What a run is made of: its model, and its samples."""
