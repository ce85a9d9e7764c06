"""Which rank holds which blocks, and how they change hands when the front of the chain freezes."""
