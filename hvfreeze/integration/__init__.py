"""For a training script of one's own: a distributed optimizer that freezes by vote, and a loader that caches."""
