from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.errors import RefusedError
from hvfreeze.freezing.frozen_prefix import hold_still
from hvfreeze.model.blocks import Chain
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.shared_trunk.strategy import Head, SharedTrunk, drop_tensors
from hvfreeze.strategies.shared_trunk.tasks import Labels, Task

SETTINGS = OptimizerConfig(lr=0.1)
FEATURES = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def build(classes: int) -> Chain:
    body = [nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), nn.Linear(8, classes)]
    return Chain.from_modules(nn.Sequential(*body), [(f"b{i}", part) for i, part in enumerate(body)])


def head(seed: int = 0, *, lr: float = 0.1, classes: int = 3) -> Head:
    labels = Labels(tuple("abcdefgh"[:classes]), LABELS, LABELS)
    return Head(Task(name="t", blocks=2, lr=lr, seed=seed), labels, SETTINGS, build=build)


def trained(one: Head, steps: int, *, rate: float = 0.1) -> list[Tensor]:
    for _ in range(steps):
        one.train(FEATURES, LABELS, PhaseClock())
        one.update(rate)
    return [tensor.clone() for _, tensor in one.tensors()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_head_is_the_same_whatever_else_its_rank_draws_and_trains() -> None:
    expected = trained(head(), 4)
    one, other = head(), head(seed=1)
    for _ in range(4):
        torch.rand(3)
        trained(other, 1)
        trained(one, 1)
    assert equal(expected, [tensor for _, tensor in one.tensors()])
    assert not equal(expected, [tensor for _, tensor in other.tensors()])


def test_a_head_that_was_put_back_goes_on_bit_for_bit() -> None:
    straight, stopped, resumed = head(), head(), head()
    before = torch.get_rng_state()
    expected = trained(straight, 5)
    trained(stopped, 2)
    resumed.load_state_dict(stopped.state_dict())
    assert equal(expected, trained(resumed, 3))
    assert torch.equal(torch.get_rng_state(), before), "a head has drawn from the rank's own generator"


@pytest.mark.parametrize(("lr", "rate", "expected"), [(0.3, 0.1, 0.3), (0.1, 0.07, 0.07), (0.2, 0.05, 0.1)])
def test_a_heads_rate_follows_the_schedule_of_lr(lr: float, rate: float, expected: float) -> None:
    one = head(lr=lr)
    trained(one, 1, rate=rate)
    assert one.optimizer.param_groups[0]["lr"] == expected


def test_a_head_holds_nothing_of_the_trunk_and_has_its_own_number_of_classes() -> None:
    one = head(classes=7)
    assert one.depth == 1 and all(p.numel() == 0 for _, p in one.chain.named_parameters(0, 1))
    assert one.predict(FEATURES).shape == (6, 7)
    assert equal([one.predict(FEATURES)], [one.predict(FEATURES)]), "evaluation mode draws nothing"


def test_what_is_frozen_stays_as_it_is_in_training_mode() -> None:
    chain = build(3)
    hold_still(chain, 2)
    chain.model.train()
    before = [tensor.clone() for tensor in chain.model.state_dict().values()]
    x = torch.randn(5, 4)
    assert torch.equal(chain.run(x, 0, 2), chain.run(x, 0, 2))
    assert equal(before, list(chain.model.state_dict().values()))
    assert not any(parameter.requires_grad for _, parameter in chain.named_parameters(0, 2))
    drop_tensors(chain, 0, 1)
    assert sum(parameter.numel() for _, parameter in chain.named_parameters(0, 1)) == 0


def repartitioned(there: int, *, heads: int, ranks: int) -> list[dict[str, Any]]:
    """Return the states of heads for so many ranks, from those of `there` ranks; this run has `heads`."""
    owns = [{"heads": {f"head{i}": {"own": i} for i in range(rank, 3, there)}, "counts": {}} for rank in range(there)]
    trunk: Any = SimpleNamespace(facts=SimpleNamespace(names=tuple(f"head{i}" for i in range(heads))))
    return list(SharedTrunk.repartitioned(trunk, owns, size=ranks, restep=lambda step: step))


def test_heads_are_dealt_to_any_ranks_unless_their_number_is_another() -> None:
    states = repartitioned(2, heads=3, ranks=3)
    assert [state["heads"] for state in states] == [{f"head{i}": {"own": i}} for i in range(3)]
    for here in (2, 4):
        with pytest.raises(
            RefusedError, match=r"3 models .head0, head.*there is one model per rank: resume on 3 ranks"
        ):
            repartitioned(3, heads=here, ranks=here)


def test_nothing_is_left_in_the_line_where_a_run_ends_in_the_middle_of_an_epoch() -> None:
    done: list[str] = []
    training = SimpleNamespace(
        line=SimpleNamespace(finish=lambda: done.append("finished")),
        begin_epoch=lambda batches: done.append("training"),
    )
    evaluation = SimpleNamespace(begin_epoch=lambda batches: done.append("evaluation"))
    trunk: Any = SimpleNamespace(_settled_in=True, training=training, evaluation=evaluation)
    SharedTrunk.begin_epoch(trunk, [], training=False)
    SharedTrunk.begin_epoch(trunk, [])
    assert done == ["finished", "evaluation", "training"]
