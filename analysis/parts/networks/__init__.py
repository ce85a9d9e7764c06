"""Training on several nodes by network: the ways that take turns, and what they came to."""
