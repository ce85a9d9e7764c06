"""The environment of a run: versions, processors, hosts and threads."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hvfreeze import __version__

PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "h5py", "numpy")
OF_EVERY_RANK = ("processor", "capability", "threads")
"""Facts that may differ between the ranks of a job."""


def facts_of_this_rank() -> dict[str, Any]:
    """Return versions, processor, host and threads of this process."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {name: version_of(name) for name in PACKAGES} | {"hvfreeze": __version__},
    }


def describe_environment(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of environment.json from every rank's facts, in rank order.

    A fact in `OF_EVERY_RANK` is a list of one value per rank if they differ; the others are rank 0's.
    """
    found: dict[str, Any] = {"size": len(ranks), "hosts": [facts["host"] for facts in ranks]}
    for name, value in ranks[0].items():
        if name != "host":
            values = [facts[name] for facts in ranks]
            found[name] = value if name not in OF_EVERY_RANK or values.count(value) == len(values) else values
    return found


def source_digest(top: Path = Path(__file__).parents[1]) -> str:
    """Return the SHA-256 over names and contents of all modules below `top`, this package's folder, in hexadecimal."""
    digest = hashlib.sha256()
    # Not rglob: the cache is a link in a source tree.
    paths = [Path(folder) / name for folder, _, names in os.walk(top, followlinks=True) for name in names]
    for path in sorted(path for path in paths if path.suffix == ".py"):
        digest.update(f"{path.relative_to(top)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def processor_name() -> str:
    """Return the processor's name from the kernel."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor()


@cache
def version_of(package: str) -> str | None:
    """Return an installed package's version, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
