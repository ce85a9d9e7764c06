"""A module for `unclosed.py` to import: its import ends once the world is open and waits for no other rank."""

from __future__ import annotations

import math
import time

import __main__

SECONDS = 30.0
ends = time.monotonic() + SECONDS
while __main__.watches[0]._comm is None or __main__.watches[0]._since < math.inf:
    if time.monotonic() > ends:
        raise ImportError("the stall watch counts this import as waiting for other ranks")
    time.sleep(0.01)
