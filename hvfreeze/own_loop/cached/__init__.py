"""A script's loader that caches: its samples numbered, its model left at a cut, rows found or computed in shares."""
