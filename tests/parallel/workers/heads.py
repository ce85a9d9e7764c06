"""Every rank fits heads on its share of one table, shares of several sizes, and reports what it solved."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.heads import kernel as fitting
from hvfreeze.heads import linear
from hvfreeze.heads import rows as rows_of_heads
from hvfreeze.heads.kernel import KernelFit, fit_kernel
from hvfreeze.heads.linear import HeadFit, fit_linear
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.tasks import Classes
from tests.single.heads.table import CLASSES, PENALTY, labelled_table

ROWS, CENTRES = 403, 84


def shares(size: int, total: int) -> dict[str, list[int]]:
    """Return how many rows each rank holds, by the name of the split."""
    even = [total // size] * (size - 1)
    lopsided = [0, *[rows_of_heads.CHUNK_ROWS + 1] * (size - 2)]
    return {"even": [*even, total - sum(even)], "first is empty": [*lopsided, total - sum(lopsided)]}


def mine(world: World, split: list[int], table: tuple[Tensor, Tensor, Tensor]) -> RowsInMemory:
    start = sum(split[: world.rank])
    return RowsInMemory(*(column[start : start + split[world.rank]] for column in table), first=start)


def digest(fit: HeadFit | KernelFit) -> str:
    names = (
        ("weight", "bias", "coefficients") if isinstance(fit, HeadFit) else ("weight", "centres", "projection", "shift")
    )
    tensors = b"".join(getattr(fit, name).numpy().tobytes() for name in names)
    return hashlib.sha256(tensors + repr(fit.summary()).encode()).hexdigest()


def fit(world: World) -> dict[str, Any]:
    table = labelled_table(ROWS)
    # Of so many rows the penalty is chosen on a part.
    with patch.object(fitting, "FEW", ROWS // 2), patch.object(rows_of_heads, "CHUNK_ROWS", ROWS // 6):
        return {"found": fits(world, table), "refused": refusals(world, table), "decided": decisions(world)}


def fits(world: World, table: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Return by the name of the split the heads that all ranks fit together."""
    found = {}
    for name, split in shares(world.size, len(table[1])).items():
        rows = mine(world, split, table)
        given = [
            fit_linear(rows, task=Classes(CLASSES), world=world, penalties=[PENALTY], tolerance=2e-5)
            for _ in range(2 if name == "even" else 1)
        ]
        digests = world.allgather_object([digest(fit) for fit in given], name="digests")
        assert len({each for theirs in digests for each in theirs}) == 1, f"{name}: ranks or repetitions differ"
        chosen = fit_linear(rows, task=Classes(CLASSES), world=world)
        assert len(set(world.allgather_object(digest(chosen), name="chosen"))) == 1, name
        found[name] = {
            "coefficients": given[0].coefficients.tolist(),
            "weight": given[0].weight.tolist(),
            "bias": given[0].bias.tolist(),
            "converged": given[0].converged,
            "compared": compared(world, rows, name),
            "penalty": chosen.penalty,
            "tried": [[trial.penalty, trial.held_out_loss, trial.held_out_accuracy] for trial in chosen.trials],
        }
    return found


def compared(world: World, rows: RowsInMemory, name: str) -> dict[str, Any]:
    """Return what a head that compares rows answers to this rank's, in this rank's order, gathered in rank order."""
    fits = [
        fit_kernel(rows, task=Classes(CLASSES), world=world, memory_bytes=kept, penalties=[0.1], tolerance=1e-6)
        for kept in (2**30, 0)
    ]
    chosen = fit_kernel(rows, task=Classes(CLASSES), world=world, memory_bytes=2**30)
    digests = [digest(fit) for fit in (*fits, chosen) if fit is not None]
    assert digests[0] == digests[1], f"{name}: lines that are kept and lines that are not give other bits"
    assert len(set(world.allgather_object(tuple(digests), name="compared"))) == 1, f"{name}: ranks differ"
    some = [
        fit_kernel(rows, task=Classes(CLASSES), world=world, memory_bytes=kept, penalties=[0.1], centres=CENTRES)
        for kept in (2**30, 300_000)
    ]
    assert some[0] is not None
    alike = {digest(fit) for fit in some if fit is not None}
    assert len({one for theirs in world.allgather_object(alike, name="some") for one in theirs}) == 1, name
    last = world.size - 1
    stops = fit_kernel(rows, task=Classes(CLASSES), world=world, memory_bytes=0, watch=lambda note: world.rank == last)
    assert stops is None, "one rank's wish ends it on all"
    assert fits[0] is not None and chosen is not None
    said, some_said = (world.allgather_object(fit.answers.tolist(), name="said") for fit in (fits[0], some[0]))
    best = max(trial.held_out_accuracy for trial in chosen.trials)
    told: dict[str, Any] = {"penalty": chosen.penalty, "rows": chosen.rows, "held_out_accuracy": best}
    told["some_said"] = [row for share in some_said for row in share]
    return {"said": [row for share in said for row in share], **told}


def decisions(world: World) -> dict[str, Any]:
    """Return what heads of few and of many rows do where one of the samples of all ranks is damaged."""
    features, labels, _ = labelled_table(240)
    features[100] *= 1e6
    # The last of several ranks has none.
    dealing = max(1, world.size - 1)
    own = torch.arange(240)[torch.arange(240) % dealing == world.rank]
    rows = RowsInMemory(features[own].repeat(2, 1), labels[own].repeat(2), (own % 10 == 0).repeat(2), own.repeat(2))
    told = {}
    for few in (True, False):
        most = 1000 if few else 100
        with patch.object(fitting, "FEW", most), patch.object(linear, "FEW_ROWS", most):
            compared = fit_kernel(rows, task=Classes(CLASSES), world=world, memory_bytes=2**30)
            separated = fit_linear(rows, task=Classes(CLASSES), world=world)
        for name, fit in (("kernel", compared), ("linear", separated)):
            assert fit is not None
            digests = world.allgather_object(
                repr(fit.summary()) + str(fit.weight.double().sum().item()), name="decided"
            )
            assert len(set(digests)) == 1, f"{name}: ranks differ"
            assert fit.used.equal(own.repeat(2) != 100), f"{name}: other rows were used"
            told[f"{name}, {'few' if few else 'many'}"] = [fit.rows, list(fit.left_out)]
    return told


def refusals(world: World, table: tuple[Tensor, Tensor, Tensor]) -> list[str]:
    """Return the names of the errors that this rank met where one rank's share is wrong, or everybody's is."""
    met = []
    split = shares(world.size, len(table[1]))["even"]
    features, labels, held_out = (column.clone() for column in table)
    features[-1, 3] = torch.nan
    try:
        fit_linear(mine(world, split, (features, labels, held_out)), task=Classes(CLASSES), world=world)
    except NumericsError as error:
        met.append(str(error))
    try:
        rows = mine(world, split, (table[0], labels, torch.zeros_like(held_out)))
        fit_linear(rows, task=Classes(CLASSES), world=world)
    except UsageError as error:
        met.append(str(error))
    try:
        fit_linear(RowsInMemory(*(column[:0] for column in table)), task=Classes(CLASSES), world=world)
    except UsageError as error:
        met.append(str(error))
    return met
