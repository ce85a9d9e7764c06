"""How a Python process in tests leaves its work to a copy of a standing process, which has PyTorch loaded already.

Loading takes seconds of processor time, a copy milliseconds. This process stays as what its launcher knows: it passes
signals on, ends as the copy ends, and with its own end the copy's comes. What it was given is handed over: command,
variables, folder, input and output. What else could make a difference is compared first; where anything differs, this
process goes on by itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import socket
import stat
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import Any

STANDING = "HVFREEZE_TEST_STANDING"
"""The variable with the common part of the standing processes' addresses; each rank number has its own."""
LIBRARIES = ("hvfreeze", "torch", "torchvision", "numpy", "PIL", "tqdm", "yaml")
"""What a standing process has loaded, of hvfreeze no more than it takes to load torchvision."""
SEEN_BY_LOADING = ("LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TORCH", "PYTORCH", "LC_")
"""Beginnings of names of variables that take effect once, while these or the interpreter are loaded."""
HANDED_OVER = ("PYTHONPATH", "PYTHONWARNINGS")
PASSED_ON = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT", "WINCH")


def address(common: str, number: str) -> str:
    """Return the abstract socket address of a standing process; other network namespaces cannot see it."""
    return f"\0{common}-{number}"


def circumstances() -> dict[str, str]:
    """Return what a process has from its parent beside what is handed over, and what loading has made of it."""
    os.umask(umask := os.umask(0o077))
    found: dict[str, Any] = {
        "executable": sys.executable,
        "users": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))],
        "root": os.readlink("/proc/self/root"),
        "cores": sorted(os.sched_getaffinity(0)),
        "umask": umask,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [resource.getrlimit(number) for name, number in vars(resource).items() if name.startswith("RLIMIT_")],
        "ignored signals": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        "libraries": [getattr(PathFinder.find_spec(name), "origin", None) for name in LIBRARIES],
        "variables": sorted(
            item for item in os.environ.items() if item[0].startswith(SEEN_BY_LOADING) and item[0] not in HANDED_OVER
        ),
    }
    return {name: repr(value) for name, value in found.items()}


def hand_over() -> None:
    """Do not return, unless this process must do its work itself."""
    words = command(sys.orig_argv[1:])
    if words is None or other_files():
        return
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    request = {
        "words": words,
        "original": sys.orig_argv,
        "warnings": sys.warnoptions,
        "path": sys.path,
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "circumstances": circumstances(),
    }
    try:
        link.connect(address(os.environ[STANDING], os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
        data = json.dumps(request).encode() + b"\n"
        socket.send_fds(link, [data[:1]], [0, 1, 2])
        link.sendall(data[1:])
        answers = link.makefile("r")
        copy = json.loads(answers.readline())
    except (OSError, ValueError):
        # Nobody stands there, or under other circumstances.
        link.close()
        return
    for name in PASSED_ON:
        signal.signal(signal.Signals[f"SIG{name}"], lambda number, frame: pass_on(copy, number))
    end_like(answers.readline())


def command(words: list[str]) -> list[str] | None:
    """Return `-m MODULE ...` or `SCRIPT.py ...`; None for any other command, as code or a script from the input."""
    while words[:1] == ["-W"]:
        words = words[2:]
    if words[:1] == ["-m"] or (words and words[0].endswith(".py")):
        return words
    return None


def other_files() -> bool:
    """Return whether this process was given open files beside input and output."""
    for name in os.listdir("/proc/self/fd"):
        # The folder itself is open while it is listed, and gone when asked about.
        with suppress(OSError):
            if int(name) > 2 and not stat.S_ISDIR(os.fstat(int(name)).st_mode):
                return True
    return False


def pass_on(copy: int, number: int) -> None:
    """Send the copy a signal that this process was sent."""
    with suppress(ProcessLookupError):
        os.kill(copy, number)


def end_like(answer: str) -> None:
    """End as the copy did: with its exit code, or by the same signal."""
    if not answer:
        print("the standing process has ended, and with it the rank", file=sys.stderr, flush=True)
        os._exit(1)
    code = os.waitstatus_to_exitcode(json.loads(answer))
    if code < 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # some cannot be handled, and need not be
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
