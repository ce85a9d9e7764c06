"""Tortures the program with random faults, and keeps what was found: `make torture`.

    python -m tests.torture --kills 200 --flips 1000 --disks 20 --out analysis/results/torture

Rounds are numbered, and a round's faults follow from --seed and its number alone. Started again with the same --out, it
makes the rounds that are missing. The exit code is 1 where anything was found.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from analysis.sweeps.kept import commit
from hvfreeze.runs.environment import processor_name, version_of
from tests.torture import disks, flips, kills
from tests.torture.ledger import Ledger


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.torture", description=__doc__.splitlines()[0])
    for kind, count in (("kills", 200), ("flips", 1000), ("disks", 20)):
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"rounds, with those that were made ({count})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("analysis/results/torture"))
    return parser.parse_args(arguments)


def chance_of(seed: int, kind: str, number: int) -> random.Random:
    return random.Random(f"{seed} {kind} {number}")


def torture_jobs(ledger: Ledger, scratch: Path, *, rounds: int, seed: int) -> None:
    """Kill jobs until so many signals were sent."""
    expected: dict[int, tuple[dict[str, object], float]] = {}
    lives: dict[int, kills.Life] = {}
    begun = 0
    while ledger.count("kill") < rounds:
        chance = chance_of(seed, "kill", ledger.count("kill") + ledger.count("undisturbed"))
        size = chance.choice(kills.SIZES)
        if size not in expected:
            expected[size] = kills.straight(size, scratch / f"straight{size}")
        if size not in lives:
            lives[size], begun = kills.Life(size, scratch / f"life{begun}"), begun + 1
        life = lives[size]
        right, longest = expected[size]
        found = kills.round_of(life, chance, expected=right, longest=longest)
        ledger.add("kill" if found.pop("sent") else "undisturbed", **found)
        if found["complete"] or found["faults"]:
            if not found["faults"]:
                shutil.rmtree(life.folder)
            del lives[size]
        show(ledger)


def torture_files(ledger: Ledger, victim: flips.Victim, *, rounds: int, seed: int) -> None:
    """Flip so many bits."""
    while (number := ledger.count("flip")) < rounds:
        ledger.add("flip", **flips.round_of(victim, chance_of(seed, "flip", number), number=number))
        if number % 50 == 0:
            show(ledger)


def torture_disks(ledger: Ledger, victim: flips.Victim, *, rounds: int, seed: int) -> None:
    """Fill so many disks."""
    while (number := ledger.count("disk")) < rounds:
        found = disks.round_of(victim, chance_of(seed, "disk", number))
        if found is None:
            print("no disk is filled: nothing may be mounted here")
            return
        ledger.add("disk", **found)
        show(ledger)


def show(ledger: Ledger) -> None:
    """Say how far it is, in a line."""
    counts = ", ".join(f"{ledger.count(kind)} {kind}s" for kind in ("kill", "flip", "disk"))
    print(f"{counts}; found: {dict(ledger.faults()) or 'nothing'}", flush=True)


def main(arguments: Sequence[str]) -> int:
    given = options(arguments)
    torch.set_num_threads(1)
    source = commit()
    ledger = Ledger(given.out)
    scratch = Path(tempfile.mkdtemp(prefix="hvfreeze-torture-"))
    try:
        if ledger.count("flip") < given.flips or ledger.count("disk") < given.disks:
            victim = flips.Victim(scratch)
            torture_files(ledger, victim, rounds=given.flips, seed=given.seed)
            torture_disks(ledger, victim, rounds=given.disks, seed=given.seed)
        torture_jobs(ledger, scratch, rounds=given.kills, seed=given.seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "horovod", "mpi4py", "h5py"))
        ledger.write_up(
            command=f"`python -m tests.torture {' '.join(arguments)}`, seed {given.seed}",
            source=source or "unknown",
            machine=f"{processor_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
            versions=f"Python {platform.python_version()}, {versions}",
        )
    print("\n".join(ledger.table()))
    return int(bool(ledger.faults()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
