"""The shared trunk strategy: several models on one frozen trunk, whose segments are on different ranks."""
