"""Errors of the activation cache; every message names the file."""

from __future__ import annotations

from hvfreeze.errors import RefusedError


class CacheFault(RefusedError):
    """A cache file is damaged, unsafe, gone or could not be written; a run may continue without the cache."""


class CacheBusy(CacheFault):
    """Another process is writing this file."""


class CacheFull(CacheFault):
    """The file does not fit: the disk is full, or the budget would be exceeded."""


class CacheMismatch(CacheFault):
    """A file contains activations of other data or another model than requested."""
