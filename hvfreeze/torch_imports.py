"""Import PyTorch faster: without the garbage collector, and while something else waits."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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


@contextmanager
def imported_beside(module: str) -> Iterator[None]:
    """Import a module in a thread while what is inside waits for something else, as for other processes.

    What is inside should import nothing that shares modules with it: threads that import each other's halves may see
    some that are not whole. An error is left to whoever imports the module next, and meets it again.
    """

    def begin() -> None:
        with suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=begin, name="imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()
