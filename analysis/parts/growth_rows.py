"""Synthetic rows, and a kernel head fitted to them by all ranks of a job.

python -m analysis.parts.growth_rows OUT '{"rows": 50000, "classes": 100, "centres": 1000, "memory_bytes": 6000000000}'

OUT gets one JSON file a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.horovod_world import open_world
from hvfreeze.comm.resources import peak_memory_bytes
from hvfreeze.heads.kernel import KernelHead, fit_kernel
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.rows import Chunk, RowInfo
from hvfreeze.tasks import Classes

WIDTH = 512
PART = 2_000
"""Rows that are made together: which rows there are does not depend on the number of ranks."""
SAMPLED = 20_000
"""Rows of all ranks in the subset that determines the projection."""
HELD_OUT_EVERY = 10
TESTED = 2_000
"""Rows that no head is fitted to."""
SPREAD, APART = 0.5, 0.2
"""How fast the variance of directions falls, and how far classes are apart: about as features of images are."""
PROCESS_BYTES = 10**9
"""Bytes of a rank without its rows: Python, torch, Horovod, and temporary copies."""


class MadeRows:
    """A rank's share of `count` rows of all ranks: classes are Gaussian, around means that are Gaussian too.

    Nothing is kept: a row is made when it is read.
    """

    width = WIDTH

    def __init__(self, count: int, *, classes: int, rank: int, size: int, first: int = 0) -> None:
        """Take every `size`-th part from `rank` on; `first` is the number of the first row of all."""
        generator = torch.Generator().manual_seed(0)
        self._scale = torch.arange(1, WIDTH + 1).float().pow(-SPREAD)
        self._means = APART * torch.randn(classes, WIDTH, generator=generator) * self._scale
        self._parts = [(start, min(PART, count - start)) for start in range(0, count, PART)][rank::size]
        self._first, self._sampled = first, max(1, SAMPLED // PART // size)
        self.count = sum(rows for _, rows in self._parts)

    def chunks(self) -> Iterator[Chunk]:
        """Return the rows."""
        return self._made(self._parts)

    def forget(self) -> None:
        """Do nothing: nothing is kept."""

    def sample(self) -> _Some | None:
        """Return the first parts where there are more."""
        return _Some(self, self._parts[: self._sampled]) if self._sampled < len(self._parts) else None

    def _made(self, parts: list[tuple[int, int]]) -> Iterator[Chunk]:
        for start, rows in parts:
            numbers = torch.arange(self._first + start, self._first + start + rows)
            generator = torch.Generator().manual_seed(1 + self._first + start)
            labels = torch.randint(len(self._means), (rows,), generator=generator)
            features = self._means[labels] + torch.randn(rows, WIDTH, generator=generator) * self._scale
            yield Chunk(features, RowInfo(labels, numbers % HELD_OUT_EVERY == 0, numbers, torch.ones(rows)))


class _Some:
    """A part of the synthetic rows."""

    width = WIDTH

    def __init__(self, rows: MadeRows, parts: list[tuple[int, int]]) -> None:
        self._rows, self._parts = rows, parts

    def chunks(self) -> Iterator[Chunk]:
        """Return these rows."""
        return self._rows._made(self._parts)


class Phases:
    """When rows were projected, and when the penalty was chosen, by the notes of the fit."""

    def __init__(self) -> None:
        self.started = self.points = self.solving = time.perf_counter()
        self._is_solving = False

    def read(self, rows: int) -> bool:
        """Take that so many rows have been read."""
        self.points = self.solving = time.perf_counter()
        return False

    def watch(self, note: str) -> bool:
        """Take a note: with the first `pass N, ...` the solver begins."""
        if note.startswith("pass") and not self._is_solving:
            self._is_solving, self.solving = True, time.perf_counter()
        return False

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now."""
        now = time.perf_counter()
        return {
            "points": self.points - self.started,
            "choice": self.solving - self.points,
            "solution": now - self.solving,
        }


def left_for_solver(memory_bytes: int, rows: int, classes: int) -> int:
    """Return what the points and the answers of a rank's rows leave of its memory."""
    answers = 2 * classes
    return max(0, memory_bytes - PROCESS_BYTES - rows * (4 * WIDTH + 4 * 3 * answers))


def solve(job: dict[str, Any]) -> dict[str, Any]:
    """Fit a head on this rank of the job, and return its time and memory."""
    world = open_world()
    torch.set_num_threads(1)
    classes = job["classes"]
    rows = MadeRows(job["rows"], classes=classes, rank=world.rank, size=world.size)
    phases = Phases()
    fit = fit_kernel(
        rows,
        task=Classes(classes),
        world=world,
        memory_bytes=left_for_solver(job["memory_bytes"], rows.count, classes),
        centres=job["centres"],
        read=phases.read,
        watch=phases.watch,
    )
    assert fit is not None, "a fit without `stop` runs to its end"
    found = {"seconds": phases.seconds(), "peak_bytes": peak_memory_bytes()}
    head = KernelHead(WIDTH, classes)
    take(head, fit)
    right = 0
    for chunk in MadeRows(TESTED, classes=classes, rank=0, size=1, first=10**9).chunks():
        right += int((head(chunk.features).argmax(1) == chunk.info.labels).sum())
    found |= {name: getattr(fit, name) for name in ("steps", "passes", "converged", "penalty", "exchanged_bytes")}
    found |= {"centres": fit.compared_with, "accuracy": right / TESTED, "digest": digest_of(fit.weight)}
    world.close()
    return found


def digest_of(tensor: Tensor) -> str:
    """Return the beginning of the SHA-256 over a tensor's bits."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().data).hexdigest()[:16]


def main(out: str, job: str) -> None:
    """Fit a head, and write its time and memory to a file per rank."""
    found = solve(json.loads(job))
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    Path(out, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
