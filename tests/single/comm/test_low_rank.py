"""PowerSGD among ranks in one process, against the paper in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.comm import low_rank
from hvfreeze.comm.low_rank import LowRankBucket

R, RANKS = 3, 3
SHAPES = [(50, 41), (24, 5, 3, 3), (9, 64)]
MATRICES = [(50, 41), (24, 45), (9, 64)]

pytestmark = pytest.mark.parametrize("at_once", [1, 32 * 41])
"""Elements: parts of 16 rows, of 32 at the least, each with a last part that has fewer, and whole matrices."""


@pytest.fixture(autouse=True)
def parts_of(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "PROJECTED_AT_ONCE", at_once)
    monkeypatch.setattr(low_rank, "WRITTEN_AT_ONCE", at_once)


def bucket(*, size: int = RANKS) -> LowRankBucket:
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(SHAPES)]
    with torch.no_grad():
        named[1][1].set_(named[1][1].to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    return LowRankBucket("tried", named, [0, 1, 2], size=size, rank=R)


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def as_matrices(tensors: list[Tensor]) -> list[Tensor]:
    """Return them in the order of memory: the second lies channels last."""
    return [tensors[0], tensors[1].permute(0, 2, 3, 1).reshape(MATRICES[1]), tensors[2]]


def step_of(
    buckets: list[LowRankBucket], step: int, *, absent: int | None = None, add: float = 0.0
) -> list[list[Tensor]]:
    """Let all ranks make a step, and return what each has as the average.

    The last rank has no gradient at `absent`, and `add` more in one entry of its last gradient.
    """
    wires: list[Tensor] = []

    def send(wire: Tensor, name: str) -> list[Any]:
        wires.append(wire)
        return []

    def add_up() -> None:
        if not wires:
            return
        total = torch.stack(wires).sum(dim=0)
        for wire in wires:
            wire.copy_(total)
        wires.clear()

    places = []
    for rank, one in enumerate(buckets):
        one.begin()
        mine = gradients(rank, step)
        if rank == len(buckets) - 1:
            mine[-1][4, 4] += add
        own = [None if rank == len(buckets) - 1 and i == absent else g for i, g in enumerate(mine)]
        places.append([one.copy_in(place, gradient) for place, gradient in enumerate(own)])
        assert one.missing == 0
    for one in buckets:
        one.start(send)
    add_up()
    for one in buckets:
        one.advance(send, lambda handle: None)
    add_up()
    for one in buckets:
        one.finish(send, lambda handle: None)
    return [[place.clone() for place in own] for own in places]


def off(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).abs().max() / exact.abs().max())


def test_a_step_is_the_papers() -> None:
    buckets = [bucket() for _ in range(RANKS)]
    for step in range(5):
        before = [one.state_dict() for one in buckets]
        absent = 0 if step == 3 else None
        got = step_of(buckets, step, absent=absent)
        after = [one.state_dict() for one in buckets]
        for i in range(len(SHAPES)):
            own = [as_matrices(gradients(rank, step))[i].double() for rank in range(RANKS)]
            if absent == i:
                own[-1].zero_()
            wholes = [g + kept[f"p{i}"]["error"].double() for g, kept in zip(own, before, strict=True)]
            right = before[0][f"p{i}"]["right"].double().t()
            left = torch.linalg.qr(torch.stack([whole @ right for whole in wholes]).mean(dim=0)).Q
            right = torch.stack([whole.t() @ left for whole in wholes]).mean(dim=0)
            average = left @ right.t()
            for rank in range(RANKS):
                assert off(as_matrices(got[rank])[i], average) < 3e-6
                assert off(after[rank][f"p{i}"]["error"], wholes[rank] - average) < 3e-6
                assert torch.equal(got[rank][i], got[0][i]), "ranks have other bits"


def test_an_error_is_exactly_what_the_average_leaves_out() -> None:
    buckets = [bucket() for _ in range(RANKS)]
    for step in range(3):
        before = [one.state_dict() for one in buckets]
        got = step_of(buckets, step)
        for rank, one in enumerate(buckets):
            for i, (own, average) in enumerate(zip(*map(as_matrices, (gradients(rank, step), got[rank])), strict=True)):
                whole = before[rank][f"p{i}"]["error"] + own
                assert torch.equal(one.state_dict()[f"p{i}"]["error"], whole - average)


def test_a_number_tells_whether_all_of_the_average_is_finite_and_no_error_remembers_what_was_not() -> None:
    buckets = [bucket() for _ in range(2)]
    for step, broken in enumerate((0.0, torch.inf, 0.0, torch.nan, 0.0)):
        step_of(buckets, step, add=broken)
        for one in buckets:
            assert bool(torch.isfinite(one.witness())) == bool(torch.isfinite(one.flat).all()) == (broken == 0.0)


def test_a_matrix_of_rank_r_arrives_whole_and_leaves_nothing() -> None:
    (alone,) = buckets = [bucket(size=1)]
    generator = torch.Generator().manual_seed(0)
    thin = [torch.randn(n, R, generator=generator) @ torch.randn(R, m, generator=generator) for n, m in MATRICES]
    alone.begin()
    shaped = [thin[0], thin[1].view(24, 3, 3, 5).permute(0, 3, 1, 2), thin[2]]
    got = [alone.copy_in(place, gradient) for place, gradient in enumerate(shaped)]
    alone.start(lambda wire, name: [])
    alone.advance(lambda wire, name: [], lambda handle: None)
    alone.finish(lambda wire, name: [], lambda handle: None)
    for mine, exact in zip(got, shaped, strict=True):
        assert off(mine, exact.double()) < 1e-4
    for name, kept in buckets[0].state_dict().items():
        assert float(kept["error"].abs().max()) < 1e-3, name
