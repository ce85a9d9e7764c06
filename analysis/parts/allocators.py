"""Compare memory allocators in training: glibc's defaults, glibc that keeps memory, huge pages, jemalloc and tcmalloc.

    python -m analysis.parts.allocators OUT --data-dir DIR [--ranks N] [--steps N] [--rounds N] [--networks NAME ...]

The ways run in turns. OUT gets one line per run; finished runs are skipped. DIR has the photographs of
`analysis.photographs`. Needs Debian's libjemalloc2 and libtcmalloc-minimal4, timm, and an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from analysis.parts.photographs import make_photographs
from analysis.photographs import NAME, PRESETS, Site, kept, perform, train_steps
from analysis.sweeps.kept import commit, publish
from analysis.sweeps.sweep import WORK
from hvfreeze.errors import RefusedError
from hvfreeze.runs.environment import facts_of_this_rank

FOLDER = "/usr/lib/x86_64-linux-gnu"
JEMALLOC, TCMALLOC = f"{FOLDER}/libjemalloc.so.2", f"{FOLDER}/libtcmalloc_minimal.so.4"
WAYS: dict[str, tuple[dict[str, str], bool]] = {
    "glibc": ({}, False),
    "glibc, memory kept": ({}, True),
    "glibc, memory kept, huge pages": ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, True),
    "jemalloc": ({"LD_PRELOAD": JEMALLOC}, False),
    "jemalloc, memory kept": ({"LD_PRELOAD": JEMALLOC, "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}, False),
    "tcmalloc": ({"LD_PRELOAD": TCMALLOC}, False),
}
"""Way -> its environment variables, and whether hvfreeze sets glibc's allocator."""


def measure(name: str, way: str, site: Site, *, ranks: int, steps: int) -> dict[str, Any]:
    """Train a network for `steps` steps; return the seconds and the resources of its ranks.

    Raises:
        RefusedError: the run failed.
    """
    variables, keeps = WAYS[way]
    words = train_steps(site, name, steps=steps, ranks=ranks)
    switches = [] if keeps else ["--default-allocator"]
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, variables):
        done = perform("hvfreeze.__main__", *words, folder=folder, ranks=ranks, switches=switches)
        return {"seconds": done.summary["train_seconds"], "steps": done.summary["steps"], **done.of_ranks}


def main() -> int:
    """Make the runs that are missing; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=WORK / NAME / "allocators")
    parser.add_argument("--networks", nargs="+", default=["EfficientNet-Lite0"])
    for flag, number in (("--ranks", 2), ("--steps", 12), ("--rounds", 2)):
        parser.add_argument(flag, type=int, default=number)
    options = parser.parse_args()
    site = Site(scale=PRESETS["reduced"], work=options.work.resolve(), data_dir=options.data_dir.resolve())
    make_photographs(site.data_dir, site.work / "made", count=site.scale.photographs, size=site.scale.size)
    lines = list(kept(options.out))
    for number in range(options.rounds):
        for name in options.networks:
            for way in WAYS:
                run = {"name": name, "way": way, "ranks": options.ranks, "number": number}
                if any(run.items() <= line.items() for line in lines):
                    continue
                try:
                    found = measure(name, way, site, ranks=options.ranks, steps=options.steps)
                except RefusedError as error:
                    print(f"allocators: error: {error}", file=sys.stderr)
                    return error.exit_code
                lines.append({**run, **found, "commit": commit(), "machine": facts_of_this_rank()["processor"]})
                publish(options.out, "".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
