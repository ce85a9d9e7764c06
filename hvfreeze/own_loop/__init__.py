"""What a training script of one's own calls: a distributed optimizer that freezes, and a loader that caches.

Imports everything below `strategies`, and neither those nor `training`.
"""
