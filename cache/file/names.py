"""The names of cache files, and what else lies in their directory."""

from __future__ import annotations

import re
from pathlib import Path

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.fingerprint import Fingerprint

DIGEST_CHARACTERS = 16
FILE_NAME = re.compile(r"activations-[0-9a-f]{16}-\d+of\d+\.h5")
TEMPORARY_SUFFIX = ".tmp"
LOCK_SUFFIX = ".lock"


def path_of(directory: Path, mark: Fingerprint, *, shard: str) -> Path:
    """Return where the rows of `mark` that rank R of N writes belong; `shard` is "RofN"."""
    return directory / f"activations-{mark.digest[:DIGEST_CHARACTERS]}-{shard}.h5"


def files_of(directory: Path, mark: Fingerprint) -> list[Path]:
    """Return the files of `mark`, of all ranks and of runs of any size."""
    pattern = f"activations-{mark.digest[:DIGEST_CHARACTERS]}-*.h5"
    return sorted(path for path in directory.glob(pattern) if FILE_NAME.fullmatch(path.name))


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all cache files in `directory`, finished or not; links and locks do not count."""
    paths = [*directory.glob("activations-*.h5"), *directory.glob(f"activations-*.h5{TEMPORARY_SUFFIX}")]
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def refusals(directory: Path, mark: Fingerprint) -> list[str]:
    """Return a line for each file of the same split with another fingerprint, naming the fields that differ."""
    lines = []
    for path in sorted(directory.glob("activations-*.h5")):
        try:
            other = ActivationFile(path).manifest.fingerprint
        except CacheFault as fault:
            lines.append(str(fault))
            continue
        if other.fields.get("split") == mark.fields.get("split") and mark.differences(other):
            lines.append(f"cache file {path} not used: {mark.explain(other)}")
    return lines
