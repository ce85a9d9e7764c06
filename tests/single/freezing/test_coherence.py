"""What blocks gain in a step, as products of gradients tell it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.freezing import coherence as module
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.coherence import Coherence, piece
from hvfreeze.freezing.freezer import Freezer, freeze_by_vote
from hvfreeze.model.traced import in_blocks


def two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def opened(
    model: nn.Module, *, interval: int, lr: float = 0.5, kind: Any = torch.optim.SGD
) -> tuple[Freezer, Coherence]:
    """Return a freezer without warm-up, and what it samples."""
    settings = FreezeConfig(freeze="coherence", interval=interval, freeze_warmup=0)
    cadence = Cadence.of(settings, steps_per_epoch=10**6, num_epochs=1)
    world, optimizer = SoloWorld(), kind(model.parameters(), lr=lr)
    freezer = Freezer(
        in_blocks(model), optimizer=optimizer, reducer=Reducer(world), world=world, settings=settings, cadence=cadence
    )
    assert freezer._coherence is not None
    return freezer, freezer._coherence


def step(freezer: Freezer, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Make a step without an update; return the gradients."""
    freezer.reducer.begin()
    freezer.chain.model(inputs).pow(2).mean().backward()
    freezer.reducer.finish()
    found = [parameter.grad.clone() for parameter in freezer.chain.model.parameters()]
    freezer.after_step(0.0)
    return found


def test_one_rank_multiplies_its_gradients_of_two_steps_in_a_row() -> None:
    freezer, seen = opened(two_blocks(), interval=100)
    seen.every = 3
    grads = [step(freezer, torch.randn(5, 3)) for _ in range(6)]
    products = [sum(float((a * b).sum()) for a, b in zip(grads[i], grads[i + 1])) for i in (0, 3)]
    assert [sum(row) for row in seen.latest] == pytest.approx([0.5 * product for product in products], rel=1e-5)


def test_a_step_that_was_made_with_gradients_that_are_not_finite_says_nothing() -> None:
    freezer, seen = opened(two_blocks(), interval=8)
    for number in range(8):
        step(freezer, torch.randn(5, 3) * (math.inf if number == 2 else 1.0))
    assert [len(rows) for rows in seen.complete] == [3] and all(map(math.isfinite, seen.peaks))
    assert max(seen.peaks) > 0


def test_samples_go_on_where_a_state_was_saved_between_two_steps_of_a_product() -> None:
    def run(*, interrupted: bool) -> list[list[float]]:
        freezer, seen = opened(two_blocks(), interval=6, lr=0.1, kind=torch.optim.Adam)
        for number in range(9):
            if interrupted and number == 7:
                state = freezer.state_dict()
                freezer.reducer.carry([])
                freezer, seen = opened(freezer.chain.model, interval=6, lr=0.1, kind=torch.optim.Adam)
                freezer.load_state_dict(state)
            step(freezer, torch.randn(5, 3))
        return [*seen.latest, *map(list, seen.complete[0]), seen.peaks]

    assert run(interrupted=True) == run(interrupted=False)


def test_pieces_are_equal_places_of_tensors_that_lie_differently_and_cover_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 8)
    weight = torch.arange(36.0).reshape(3, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    other = weight.contiguous()
    parts = [piece(weight, turn, like=weight) for turn in range(4)]
    assert [times for _, times in parts] == [4.5] * 4
    assert all(torch.equal(part, piece(other, turn, like=weight)[0]) for turn, (part, _) in enumerate(parts))
    assert len({float(value) for part, _ in parts for value in part}) == 32, "one piece in each turn"


def test_evidence_is_of_some_intervals_and_forgotten_at_another_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 7)
    freezer, seen = opened(two_blocks(), interval=6)
    lengths = []
    for number in range(30):
        step(freezer, torch.randn(5, 3))
        if number % 6 == 5:
            lengths.append(len(seen.gains or ()))
    assert lengths == [0, 6, 9, 9, 9], "three samples an interval; as many intervals as hold seven, at least two"
    peaks = list(seen.peaks)
    freezer.freeze(1)
    assert seen.gains is None and seen.peaks == peaks
    assert max(peaks) > 0


def test_a_look_finds_what_frozen_blocks_would_gain_and_changes_nothing() -> None:
    model = two_blocks()
    freezer, seen = opened(model, interval=6)
    freezer.freeze(1)
    inputs = torch.randn(4, 5, 3)
    every = [parameter.requires_grad_(True) for parameter in model.parameters()]
    alone = [torch.autograd.grad(model(part).pow(2).mean(), every) for part in inputs]
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    freezer.probe(model(part).pow(2).mean() for part in inputs)
    (rows,) = seen.probes
    pairs = [sum(float((a * b).sum()) for a, b in zip(alone[0][:2], other[:2])) for other in alone[1:]]
    assert rows[0][0] == pytest.approx(0.5 * sum(pairs) / 3, rel=1e-4)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert all(p.grad is None for p in model[0].parameters())


@pytest.mark.parametrize(("passes", "scales"), [(1, [1.0] * 4), (3, [1.0] * 4), (1, [2.0, 8.0, 8.0, 4.0])])
def test_steps_of_a_script_look_at_frozen_blocks_themselves(passes: int, scales: list[float]) -> None:
    model = two_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    freezer = freeze_by_vote(model, optimizer, SoloWorld(), steps_per_epoch=10, num_epochs=9)
    freezer.freeze(1)
    seen, every, gradients = freezer._coherence, list(model.parameters()), []
    assert seen is not None
    for number in range(10):
        inputs = torch.randn(6, 3)
        alone = copy.deepcopy(model).requires_grad_(True)
        scale = scales[number - 6] if 6 <= number < 10 else 1.0
        freezer.reducer.begin(passes=passes)
        for part in inputs.chunk(passes):
            (model(part).pow(2).mean() / passes * scale).backward()
        assert [parameter.requires_grad for parameter in every] == [False] * 2 + [True] * 2
        freezer.reducer.finish()
        assert all(parameter.grad is None for parameter in every[:2])
        if 6 <= number < 10:
            gradients.append(torch.autograd.grad(alone(inputs).pow(2).mean(), list(alone.parameters())))
        probing = freezer.probing
        freezer.after_step(0.0, scale=scale)
        assert probing == (6 <= number < 10) and not freezer.needs_probe, number
    (rows,) = seen.probes
    for own, row in enumerate(rows):
        others = [gradient for number, gradient in enumerate(gradients) if number != own]
        for block, of in ((0, slice(0, 2)), (1, slice(2, 4))):
            pairs = [sum(float((a * b).sum()) for a, b in zip(gradients[own][of], other[of])) for other in others]
            assert row[block] == pytest.approx(0.5 * sum(pairs) / 3, rel=1e-4)


def test_looks_come_in_pairs_each_twice_as_late_as_the_one_before() -> None:
    model = two_blocks()
    freezer, _ = opened(model, interval=2, lr=0.0)
    freezer.freeze(1)
    due = []
    for number in range(40):
        freezer.reducer.begin()
        model(torch.randn(5, 3)).pow(2).mean().backward()
        freezer.reducer.finish()
        if freezer.needs_probe:
            due.append(number // 2 + 1)
            freezer.probe(model(torch.zeros(2, 3)).pow(2).mean() for _ in range(4))
        freezer.after_step(0.0)
        if freezer.cut == 0:
            freezer.freeze(1)
    assert due[:6] == [2, 3, 6, 7, 14, 15]


def test_ranks_of_one_model_give_alike_numbers_whether_their_blocks_train_or_not() -> None:
    torch.manual_seed(0)
    given: dict[tuple[int, int], list[list[float]]] = {(0, 2): [], (2, 4): []}
    for held, sums in given.items():
        chain, world = in_blocks(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))), SoloWorld()
        settings = FreezeConfig(freeze="coherence", cut=2, interval=8, freeze_warmup=8)

        def join(mine: Sequence[float], sums: list[list[float]] = sums) -> list[float]:
            sums.append(list(mine))
            return list(mine)

        freezer = Freezer(
            chain,
            optimizer=torch.optim.SGD([parameter for _, parameter in chain.named_parameters(*held)], lr=0.1),
            reducer=Reducer(world),
            world=world,
            settings=settings,
            cadence=Cadence.of(settings, steps_per_epoch=16, num_epochs=4),
            held=held,
            join=join,
        )
        for _ in range(16):
            freezer.reducer.begin()
            if freezer.reducer.carried:
                chain.run(torch.randn(3, 4), *held).square().mean().backward()
            freezer.reducer.finish()
            freezer.after_step(0.0)
    frozen, trained = given.values()
    assert list(map(len, frozen)) == list(map(len, trained)), "an allreduce of unlike shapes"
    rows = [sums for sums in trained if len(sums) > 4]
    assert rows and any(any(sums) for sums in rows)
    assert not any(any(value not in (0.0, 1.0) for value in sums) for sums in frozen)


def test_a_sample_that_is_of_no_use_on_one_rank_is_used_on_none() -> None:
    freezer, seen = opened(two_blocks(), interval=100)
    count = len(freezer.chain.blocks)
    seen.latest = [[value] * count for value in (1.0, math.nan, 2.0, 3.0)]
    # The other rank, of whose samples the third is not finite.
    half = [1.0, *[0.5] * count]
    theirs = [1.0, *half, *half, *[0.0] * (1 + count), *half]
    seen.join = lambda mine: [ours + other for ours, other in zip(mine, theirs, strict=True)]
    seen.end_interval()
    assert seen.complete == [((1.5,) * count, (3.5,) * count)]
