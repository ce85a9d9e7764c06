"""What `invariants` checks of freezing: blocks rest, and ranks vote and move alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.equal_models import check_replicas
from hvfreeze.ranks.world import World
from tests.parallel.workers.parts import Parts


def frozen_state(parts: Parts, cut: int) -> list[Tensor]:
    return [t.clone() for _, t in [*parts.chain.named_parameters(0, cut), *parts.chain.named_buffers(0, cut)]]


def check_frozen_blocks_do_not_move(world: World) -> None:
    parts = Parts(world)
    for _ in range(3):
        parts.step()
    momentum = {n: parts.optimizer.state[p]["momentum_buffer"].clone() for n, p in parts.chain.named_parameters(2)}
    parts.freezer.freeze(2)
    check_replicas(parts.model, world, step=3)
    for name, parameter in parts.chain.named_parameters(2):
        assert torch.equal(parts.optimizer.state[parameter]["momentum_buffer"], momentum[name]), "momentum was lost"
    before, frozen_before = frozen_state(parts, 2), frozen_state(parts, 1)
    thawed = parts.model[1][0].weight.clone()
    head = parts.model[3][1].weight.clone()
    for _ in range(5):
        parts.step()
    assert all(torch.equal(a, b) for a, b in zip(before, frozen_state(parts, 2), strict=True)), "a frozen block moved"
    assert not torch.equal(head, parts.model[3][1].weight)
    assert all(not m.training for m in parts.chain.modules(0, 2)) and parts.model[2].training
    assert all(p.grad is None and p not in parts.optimizer.state for _, p in parts.chain.named_parameters(0, 2))

    parts.freezer.thaw(1)
    assert parts.model[1].training and not parts.model[0].training
    assert all(p not in parts.optimizer.state for _, p in parts.chain.named_parameters(1, 2)), "old momentum came back"
    for _ in range(2):
        parts.step()
    still = frozen_state(parts, 1)
    assert all(torch.equal(a, b) for a, b in zip(frozen_before[: len(still)], still, strict=True))
    assert not torch.equal(parts.model[1][0].weight, thawed), "the thawed block rests"
    assert len(parts.optimizer.param_groups[0]["params"]) == len(parts.chain.named_parameters(1))


def check_a_frozen_parameter_that_is_moved_by_hand_is_noticed(world: World) -> None:
    parts = Parts(world)
    parts.freezer.freeze(1)
    parts.step()
    with torch.no_grad():
        parts.model[0][0].weight.add_(1e-3)
    try:
        parts.step()
    except DivergedError as error:
        assert "0.0.weight" in str(error)
    else:
        raise AssertionError("nobody noticed")


def check_votes_move_all_ranks_alike(world: World) -> None:
    parts = Parts(world, freeze="gradient-norm", eta_max=math.inf, vote_weight="snr", quorum=0.3, shadow="percentile")
    lines = []
    for _ in range(60):
        decision = parts.step()
        if decision is not None:
            check_replicas(parts.model, world, step=parts.freezer.step)  # buffers too: averaged at every vote
            lines.append(decision)
    assert len(set(world.allgather_object(str(lines), name="test.votes"))) == 1
    assert parts.freezer.cut > 0, "sixty steps without a single frozen block"
    assert any(len(set(line.proposals)) > 1 for line in lines) or world.size == 1, "local signals never differed"


def check_averaged_signals_leave_nothing_to_vote_on(world: World) -> None:
    parts = Parts(world, freeze="gradient-norm", eta_max=math.inf, signal="averaged")
    seen: list[float] = []
    for _ in range(30):
        decision = parts.step()
        if decision is not None:
            assert len(set(decision.proposals)) == 1  # type: ignore[attr-defined]
            etas = decision.etas  # type: ignore[attr-defined]
            assert all(row == etas[0] for row in etas)
            seen += [eta for eta in etas[0] if eta]
    assert seen, "the averaged gradients were never looked at"
