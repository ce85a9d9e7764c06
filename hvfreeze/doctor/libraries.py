"""Facts about this machine's libraries, gathered in other processes because importing a library may crash.

`python -m hvfreeze.doctor.libraries NAME...` prints the facts of each library as a line of JSON; `probe` runs that and
parses it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Probe:
    """The `facts` of one library, or the reason why there are none in `error` (empty on success)."""

    facts: dict[str, str] = field(default_factory=dict)
    error: str = ""


def probe(*names: str, timeout_seconds: float = 120.0) -> dict[str, Probe]:
    """Return the facts of libraries, imported one after the other in a new process.

    A crash, an exception or a timeout becomes the `error` of the library that was being imported; the ones after it
    are then imported in another process.
    """
    command = [sys.executable, "-m", "hvfreeze.doctor.libraries", *names]
    output, error = run_and_read(command, timeout_seconds=timeout_seconds)
    # A library may print lines too.
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found = {name: Probe(json.loads(line)) for name, line in zip(names, lines)}
    if not error:
        return found
    # The last library may also fail at the end of the process.
    failed = min(len(lines), len(names) - 1)
    later = names[failed + 1 :]
    found[names[failed]] = Probe(error=error)
    return found | (probe(*later, timeout_seconds=timeout_seconds) if later else {})


def run_and_read(command: Sequence[str], *, timeout_seconds: float = 30.0) -> tuple[str, str]:
    """Return the standard output of `command`, and one line about its failure or ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except FileNotFoundError:
        return "", f"{command[0]} is not on the PATH"
    except subprocess.TimeoutExpired as error:
        # Its output is in bytes, whatever the arguments.
        printed = error.stdout if isinstance(error.stdout, bytes) else b""
        why = f"no answer within {timeout_seconds:.0f} s; if the machine is busy, try again"
        return printed.decode(errors="replace"), why
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        return done.stdout, f"{said[-1].strip() if said else 'no message'} ({how})"
    return done.stdout, ""


def mpi_name(text: str) -> str:
    """Return family and version, such as `Open MPI 4.1.4`, from the output of mpirun or MPI_Get_library_version."""
    for family, pattern in (
        ("Open MPI", r"Open MPI\)? v?(\d[\w.]*)"),
        ("MPICH", r"(?:MPICH Version:|HYDRA build details:\s*Version:)\s*(\d[\w.]*)"),
    ):
        found = re.search(pattern, text)
        if found:
            return f"{family} {found.group(1)}"
    return text.strip().splitlines()[0] if text.strip() else ""


def _torch() -> dict[str, str]:
    import torch

    return {
        "version": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _torchvision() -> dict[str, str]:
    from hvfreeze.torchvision_shim import shim_used, torchvision

    return {"version": torchvision.__version__, "shim": "yes" if shim_used() else ""}


def _horovod() -> dict[str, str]:
    import horovod
    import horovod.torch as hvd

    built = json.loads((Path(horovod.__file__).parent / "metadata.json").read_text(encoding="utf-8"))
    return {
        "version": horovod.__version__,
        "mpi_built": "yes" if hvd.mpi_built() else "",
        "built_with_torch": built.get("pytorch", "none"),
        "torch": version("torch"),
        "mpi": _loaded_mpi(),
    }


def _mpi4py() -> dict[str, str]:
    import mpi4py

    mpi4py.rc.initialize = False
    library = importlib.import_module("mpi4py.MPI")
    return {"version": mpi4py.__version__, "mpi": mpi_name(library.Get_library_version())}


def _h5py() -> dict[str, str]:
    import h5py

    return {"version": h5py.version.version, "hdf5": h5py.version.hdf5_version}


def _loaded_mpi() -> str:
    # Horovod does not tell its MPI; the library that its extension pulled in does, and may be asked before MPI_Init.
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    paths = sorted({word for word in mapped if re.fullmatch(r"/.*/libmpi\.so[\d.]*", word)})
    if not paths:
        return ""
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(paths[0]).MPI_Get_library_version(text, ctypes.byref(length))
    return mpi_name(text.value.decode())


LIBRARIES: dict[str, Callable[[], dict[str, str]]] = {
    "torch": _torch,
    "torchvision": _torchvision,
    "horovod": _horovod,
    "mpi4py": _mpi4py,
    "h5py": _h5py,
}

if __name__ == "__main__":
    for library in sys.argv[1:]:
        print(json.dumps(LIBRARIES[library]()), flush=True)
