"""What the copy of a standing process does: it becomes the process that asked for it, runs its command and ends as it.

Loaded by standing.py before anything else, and forgotten by the copy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

SET_PARENT_DEATH_SIGNAL = 1
FILTERS = list(warnings.filters)


class Request:
    """What an asking process wants: its command, and the circumstances in which it would run it."""

    def __init__(self, link: socket.socket) -> None:
        first, self.files, _, _ = socket.recv_fds(link, 1, 3)
        with link.makefile("rb") as reader:
            self.content: dict[str, Any] = json.loads(first + reader.readline())

    def close(self) -> None:
        """Close the files that came with it."""
        for file in self.files:
            os.close(file)


def become(request: Request) -> list[str]:
    """Make this process the one that asked, and return its command."""
    content = request.content
    # A group of its own, so that no signal is meant for two. Not a session: the scheduler may share out processors to
    # sessions first (autogroup), and a waiting rank's sched_yield would give the ranks of other sessions nothing.
    os.setpgid(0, 0)
    # A standing process that is killed can end no copy.
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    for target, file in enumerate(request.files):
        os.dup2(file, target)
    request.close()
    os.chdir(content["folder"])
    os.environ.clear()
    os.environ.update(content["variables"])
    show_variables()
    sys.orig_argv[:] = content["original"]
    sys.path[:] = ["", *content["path"]]
    importlib.invalidate_caches()
    take_warning_options(content["warnings"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    for name in ("handover", __name__):
        del sys.modules[name]
    # What would otherwise be the same in all copies, or still be this process's.
    time.tzset()
    tempfile.tempdir = None
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
        sys.modules["numpy"].random.seed()
    if trace_after := os.environ.get("HVFREEZE_TEST_TRACE_AFTER"):
        faulthandler.dump_traceback_later(float(trace_after))
    words: list[str] = content["words"]
    return words


def take_warning_options(options: list[str]) -> None:
    """Put the filters that `options` ask for where they would be: behind those that loading has added."""
    added = [entry for entry in warnings.filters if entry not in FILTERS]
    warnings.filters[:] = FILTERS  # type: ignore[index]
    sys.warnoptions[:] = options
    warnings._processoptions(options)  # type: ignore[attr-defined]
    warnings.filters[:0] = added  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def show_variables() -> None:
    """Make /proc/PID/environ show this process's variables, by which others find the processes of a job.

    What it shows is the memory of the variables that a program was started with: here the standing process's.
    """
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items())
    assert len(shown) <= end - start, f"{len(shown)} bytes of variables, room for {end - start}"
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def run(words: list[str]) -> int:
    """Do what `python WORDS` does, and return the exit code, below 0 for the end by a signal."""
    try:
        if words[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.path[0] = str(Path(words[0]).resolve().parent)
            sys.argv = words
            main = sys.modules["__main__"]
            main.__file__ = words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        where = error.__traceback__
        while where and where.tb_frame.f_code.co_filename == __file__:
            where = where.tb_next
        sys.excepthook(type(error), error.with_traceback(where), where)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(code: int) -> None:
    """End this process as the interpreter does, but for taking thousands of modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # Python's threads must not run on meanwhile: hence with the interpreter's lock held.
    ctypes.PyDLL(None).exit(code)
