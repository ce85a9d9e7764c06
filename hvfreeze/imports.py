"""Imports without the garbage collector, which would look through all that they make, time and again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Spare what is imported inside from the garbage collector: now, in the run, and at the interpreter's end.

    Torch's half a million objects live as long as the process. Looking through them takes a sixth of the time of the
    imports, a tenth of a second in every full collection, and half a second at the end.
    """
    loaded = len(sys.modules)
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Not where nothing was left to import: what else has been made by then may become garbage.
        if len(sys.modules) > loaded:
            gc.freeze()
        gc.enable()
