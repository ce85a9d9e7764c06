"""Checkpoints: the file, what goes into it, and how a run goes on from it, on as many ranks as before or on others."""

from __future__ import annotations
