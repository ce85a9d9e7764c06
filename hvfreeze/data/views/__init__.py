"""Views of samples: which ones an epoch shows, and the pixels of each, the same on every rank and in every batch."""
