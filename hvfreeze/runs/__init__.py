"""The run directory: what is written there, by whom and how safely, and how it is read again."""
