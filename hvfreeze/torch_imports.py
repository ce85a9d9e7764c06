"""Import PyTorch faster: without garbage collection, and in parallel with other work."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Exclude objects imported inside from garbage collection: now, during the run, and at the interpreter's end.

    Torch's half a million objects live as long as the process. Traversing them takes a sixth of the import time, a
    tenth of a second in each full collection, and half a second at the end.
    """
    loaded = len(sys.modules)
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Only if something was imported: other objects may become garbage.
        if len(sys.modules) > loaded:
            gc.freeze()
        gc.enable()


@contextmanager
def imported_beside(module: str) -> Iterator[None]:
    """Import a module in a thread while the body waits, for example for other processes.

    The body must not import modules that the thread also imports: it could see them half initialised. An import error
    is raised again by the next import of the module.
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
