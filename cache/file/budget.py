"""How much disk the caches of this process may take, over splits and cuts."""

from __future__ import annotations

import threading
from pathlib import Path

from hvfreeze.cache.faults import CacheFull


class Budget:
    """Bytes of the files that this process has allocated, never above `limit_bytes` (None: unlimited)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may still be reserved; None is unlimited."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)

    def reserve(self, num_bytes: int, *, path: Path) -> None:
        """Takes `num_bytes` for `path`.

        Raises:
            CacheFull: they would exceed the limit; nothing was taken.
        """
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes:
                raise CacheFull(
                    f"cache file {path} needs {num_bytes} bytes: {self.used_bytes} of this process's share "
                    f"of --cache-limit, {self.limit_bytes}, are taken; raise it or take a deeper cut"
                )
            self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives back what `reserve` took, or what a removed file of an earlier run had been using."""
        with self._lock:
            self.used_bytes -= num_bytes
