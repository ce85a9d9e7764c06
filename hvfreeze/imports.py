"""Import PyTorch faster, without garbage collection and in parallel with other work, and whole."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Import modules whole, and exclude their objects from garbage collection; the body only imports.

    An interrupt (SIGINT) is raised after the body. Libraries suppress exceptions while they import their optional
    parts: an interrupt would be lost, and leave a module half initialised.
    """
    with interrupted_after(), uncollected():
        yield


def import_whole(module: str) -> Any:
    """Import a module and return it; an interrupt (SIGINT) is raised after that."""
    with interrupted_after():
        return importlib.import_module(module)


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Handle an interrupt (SIGINT) in the body after it; do nothing outside of the main thread, or if it is ignored."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])


@contextmanager
def uncollected() -> Iterator[None]:
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
    """Import a module in a thread, uncollected, while the body waits, for example for other processes.

    The body must not import modules that the thread also imports: it could see them half initialised. An import error
    is raised again by the next import of the module.
    """

    def begin() -> None:
        with suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=begin, name="imports")
    with uncollected():
        thread.start()
        try:
            yield
        finally:
            thread.join()
