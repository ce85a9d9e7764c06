"""The names of cache files, and what else lies in their directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.file.rows import Keys
from hvfreeze.cache.fingerprint import Fingerprint

DIGEST_CHARACTERS = 16
FILE_NAME = re.compile(r"activations-[0-9a-f]{16}-\d+of\d+\.h5")
TEMPORARY_SUFFIX = ".tmp"
LOCK_SUFFIX = ".lock"


def path_of(directory: Path, mark: Fingerprint, *, shard: str) -> Path:
    """Return where the rows of `mark` that rank R of N writes belong; `shard` is "RofN"."""
    return directory / f"activations-{mark.digest[:DIGEST_CHARACTERS]}-{shard}.h5"


def shard_of(path: Path) -> int:
    """Return the rank that has written the file at `path`, by its name."""
    return int(path.stem.rpartition("-")[2].partition("of")[0])


def files_of(directory: Path, mark: Fingerprint) -> list[Path]:
    """Return the files of `mark`, of all ranks and of runs of any size."""
    pattern = f"activations-{mark.digest[:DIGEST_CHARACTERS]}-*.h5"
    return sorted(path for path in directory.glob(pattern) if FILE_NAME.fullmatch(path.name))


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all cache files in `directory`, finished or not; links and locks do not count."""
    paths = [*directory.glob("activations-*.h5"), *directory.glob(f"activations-*.h5{TEMPORARY_SUFFIX}")]
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


@dataclass(frozen=True, eq=False)
class Present:
    """What lies in a directory of the rows that a process may store."""

    rows: int
    """That may be read."""
    absent: Keys
    """(rows,) keys of the others, ascending."""
    rows_to_complete: int = 0
    """Those of them in the process's own file, where that is incomplete: completing it writes them anew."""


def find_present(directory: Path, mark: Fingerprint, keys: Keys, *, shard: str, private: bool = True) -> Present:
    """Return which of `keys`, each once, lie in published files of `mark`.

    Raises:
        CacheFault: a file of this fingerprint is damaged, unsafe or belongs to another one.
    """
    own, missing, in_own = path_of(directory, mark, shard=shard), np.unique(keys), 0
    total = len(missing)
    for path in sorted(files_of(directory, mark), key=lambda path: path != own):
        if len(missing):
            file = ActivationFile(path, expected=mark, private=private)
            missing = np.setdiff1d(missing, file.keys, assume_unique=True)
            in_own = len(file.keys) if path == own else in_own
    return Present(total - len(missing), missing, in_own if len(missing) else 0)


def refusals(directory: Path, mark: Fingerprint) -> list[str]:
    """Return a line for each fingerprint of files of the same split and cut that are not used, naming what differs.

    Files of one fingerprint, which ranks have written together, are opened once for all of them.
    """
    lines, seen = [], {mark.digest[:DIGEST_CHARACTERS]}
    for path in sorted(path for path in directory.glob("activations-*.h5") if FILE_NAME.fullmatch(path.name)):
        digest = path.name.split("-")[1]
        if digest in seen:
            continue
        seen.add(digest)
        try:
            other = ActivationFile(path).manifest.fingerprint
        except CacheFault as fault:
            lines.append(str(fault))
            continue
        alike = all(other.fields.get(name) == mark.fields.get(name) for name in ("split", "cut"))
        if alike and mark.differences(other):
            lines.append(f"cache file {path} not used: {mark.explain(other)}")
    return lines
