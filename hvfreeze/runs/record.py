"""The run directory: what rank 0 keeps of a run, line by line, so that nothing is lost when the run is."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from hvfreeze.config.tree import Config, to_dict
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.freezing.vote import Decision
from hvfreeze.ranks.world import World
from hvfreeze.training.checkpoint import publish

HARMLESS = (
    "run_dir",
    "resume",
    "json",
    "data_dir",
    "cache",
    "cache_dir",
    "cache_limit",
    "cache_shared",
    "cache_failure",
)
"""Leaves of the configuration that may differ between a run and its resumption: they never change a result."""
PER_RANK = ("run_dir", "json", "data_dir", "cache_dir")
"""Leaves that may differ between ranks: rank 0's counts, or every machine has its own path."""
PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "h5py", "numpy", "hvfreeze")


class NullRecord:
    """What every rank but 0 keeps of a run: nothing."""

    def metrics(self, line: dict[str, Any]) -> None:
        """Keep nothing."""

    def decision(self, decision: Decision) -> None:
        """Keep nothing."""

    def position(self) -> dict[str, int]:
        """Return no position."""
        return {}

    def cut_back(self, position: dict[str, int]) -> None:
        """Cut nothing."""

    def summary(self, summary: dict[str, Any]) -> None:
        """Keep nothing."""


class Record:
    """Rank 0's files in the run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = {name: directory / f"{name}.jsonl" for name in ("metrics", "decisions")}
        for path in self._files.values():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def metrics(self, line: dict[str, Any]) -> None:
        """Append an epoch's line."""
        self._append("metrics", line)

    def decision(self, decision: Decision) -> None:
        """Append a vote's line."""
        self._append("decisions", dataclasses.asdict(decision))

    def position(self) -> dict[str, int]:
        """Return the length in bytes of each file that grows, to be kept in a checkpoint."""
        return {name: path.stat().st_size for name, path in self._files.items()}

    def cut_back(self, position: dict[str, int]) -> None:
        """Drop the lines that were written after the checkpoint with this `position`; an empty one drops all."""
        for name, path in self._files.items():
            os.truncate(path, min(position.get(name, 0), path.stat().st_size))

    def summary(self, summary: dict[str, Any]) -> None:
        """Publish summary.json."""
        publish(self.directory / "summary.json", [json.dumps(summary, indent=1).encode() + b"\n"])

    def _append(self, name: str, line: dict[str, Any]) -> None:
        try:
            with self._files[name].open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RefusedError(f"{self._files[name]} cannot be written: {error.strerror}") from error


def choose_directory(config: Config, world: World) -> Path:
    """Return the run directory, the same on every rank; rank 0 names it when the user did not.

    Collective: every rank of `world` must call this.
    """
    model = re.sub(r"[^A-Za-z0-9_.-]+", "_", config.model.model)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{config.data.data}-{config.freeze.freeze}"
    chosen = config.run.run_dir or str(Path("runs") / name)
    return Path(world.broadcast_object(chosen, name="run.directory")).resolve()


def claim_directory(directory: Path, config: Config) -> None:
    """Make sure that the run can use `directory`, which is made where it is missing; nothing in it is changed.

    Raises:
        UsageError: the directory holds another run, or cannot be written.
        RefusedError: --resume with another configuration; the message shows the difference.
    """
    known = directory / "config.yaml"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if known.exists():
            check_same_run(directory, yaml.safe_load(known.read_text(encoding="utf-8")), config)
        probe = directory / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(directory, error) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise damaged(known) from error


def check_same_run(directory: Path, held: Any, config: Config) -> None:
    """Refuse a directory that holds another run than the one that `config` resumes."""
    if not config.run.resume:
        raise UsageError(f"--run-dir ({directory}) holds a run; continue it with --resume, or choose another directory")
    if not isinstance(held, dict) or not all(isinstance(section, dict) for section in held.values()):
        raise damaged(directory / "config.yaml")
    differences = [
        f"{leaf}: {held.get(section, {}).get(leaf)!r} there, {value!r} here"
        for section, leaves in to_dict(config).items()
        for leaf, value in leaves.items()
        if leaf not in HARMLESS and held.get(section, {}).get(leaf) != value
    ]
    if differences:
        raise RefusedError(f"--resume: {directory} holds another run ({'; '.join(differences)})")


def unwritable(directory: Path, error: OSError) -> UsageError:
    """Return the refusal of a run directory that the operating system does not let us write."""
    return UsageError(f"--run-dir ({directory}) cannot be written: {error.strerror}; choose another")


def damaged(known: Path) -> RefusedError:
    """Return the refusal of a run whose configuration cannot be read."""
    return RefusedError(f"{known} is damaged; choose another --run-dir")


def open_record(directory: Path, config: Config, *, environment: dict[str, Any]) -> Record:
    """Write what the run is into a directory that `claim_directory` accepts, and open its logs.

    Raises:
        UsageError: the directory cannot be written.
        RefusedError: the disk is full.
    """
    known = directory / "config.yaml"
    try:
        if not known.exists():
            publish(known, [yaml.safe_dump(to_dict(config), sort_keys=False).encode()])
        publish(directory / "environment.json", [json.dumps(environment, indent=1).encode() + b"\n"])
        return Record(directory)
    except OSError as error:
        raise unwritable(directory, error) from error


def describe_environment(world: World) -> dict[str, Any]:
    """Return versions, processors, hosts and the world's size.

    Collective: every rank of `world` must call this.
    """
    hosts = world.allgather_object(socket.gethostname(), name="environment.hosts")
    return {
        "size": world.size,
        "hosts": hosts,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def processor_name() -> str:
    """Return the processor's name as the kernel tells it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor()


def version_of(package: str) -> str | None:
    """Return an installed package's version, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
