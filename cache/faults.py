"""What can be wrong with a cache file or its directory; every message names the file."""

from __future__ import annotations

from hvfreeze.errors import RefusedError


class CacheFault(RefusedError):
    """A cache file is damaged, unsafe, gone or could not be written; a run may go on without the cache."""


class CacheBusy(CacheFault):
    """Another process is building this file."""


class CacheFull(CacheFault):
    """The file does not fit: the disk is full or the budget would be exceeded."""


class CacheMismatch(CacheFault):
    """A file holds activations of something else than what was asked for."""
