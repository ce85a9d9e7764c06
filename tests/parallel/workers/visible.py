"""Reports what a process can know of itself; may first be told to do something that the next job should not notice."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from tests.parallel.mpirun import OUT_VARIABLE, report

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
LAST = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) == RANK + 1


def seen() -> dict[str, Any]:
    import numpy
    import torch

    for name in ("torch._dynamo", "hvfreeze.torchvision_shim"):
        importlib.import_module(name)
    shown = Path("/proc/self/environ").read_text().strip("\0").split("\0")
    # PyTorch notes there where it would keep what it compiles, which nothing here does.
    job = ("OMPI_", "PMIX_", "ORTE_", "HVFREEZE_", "HOROVOD_", "TORCHINDUCTOR_")
    return {
        "arguments": sys.argv,
        "command": sys.orig_argv[1:],
        "path": sys.path,
        "main": [__name__, __file__, sys.modules["__main__"] is sys.modules[__name__]],
        "package": __spec__.name if __spec__ else None,
        "folder": os.getcwd(),
        "variables": sorted(item for item in os.environ.items() if not item[0].startswith(job)),
        "variables that others see": sorted(entry for entry in shown if not entry.startswith(job)),
        "temporary files": tempfile.gettempdir(),
        "threads": [len(os.listdir("/proc/self/task")), threading.active_count(), torch.get_num_threads()],
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__, hasattr(builtins, "left")],
        "logging": [str(handler) for handler in logging.getLogger().handlers],
        "numbers": str(torch.get_default_dtype()),
        "warnings": [str(entry) for entry in warnings.filters],
        "program": sorted(name for name in sys.modules if name.partition(".")[0] in ("h5py", "horovod", "mpi4py")),
        "files": len([name for name in os.listdir("/proc/self/fd") if int(name) > 2]),
        "own": [
            random.random(),
            float(numpy.random.random()),
            torch.rand(1).item(),
            torch.initial_seed(),
            hash("text"),
        ],
        "parent": os.getppid(),
    }


def leave_things_behind() -> None:
    import torch

    os.chdir("/")
    os.environ["OMP_NUM_THREADS"] = os.environ["LEFT"] = "7"
    os.umask(0o077)
    sys.excepthook = print
    builtins.left = True  # type: ignore[attr-defined]
    sys.path.insert(0, "/left")
    sys.modules["left"] = sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, print)
    logging.basicConfig()
    warnings.simplefilter("error")
    tempfile.tempdir = "/"
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    torch.nn.Linear.forward = None  # type: ignore[method-assign,assignment]
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    os.open("/dev/null", os.O_RDONLY)


def leave_a_process_behind() -> None:
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["sleep", "3600"], start_new_session=True, **silent)  # type: ignore[call-overload]


def wait_for_a_signal() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    Path(os.environ[OUT_VARIABLE], "waiting").write_text(str(os.getpid()))
    while True:
        signal.pause()


def fail(mode: str) -> None:
    if mode == "raise":
        raise LookupError("on the last rank")
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "exit":
        os._exit(3)
    if mode == "say":
        sys.exit("some words")
    if mode == "hang":
        time.sleep(3600)


MODES = {
    "spoil": leave_things_behind,
    "see": lambda: report(RANK, **seen()),
    "parent": lambda: report(RANK, parent=os.getppid(), variables=dict(os.environ)),
    "first": lambda: report(RANK) if RANK == 0 else None,
    "orphan": leave_a_process_behind,
    "wait": wait_for_a_signal,
}

if __name__ == "__main__":
    for mode in sys.argv[1:]:
        if mode in MODES:
            MODES[mode]()
        elif LAST:
            fail(mode)
    print("done\n", end="")
