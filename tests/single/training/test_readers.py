"""Which settings have an effect where there are several ranks; tests/single/test_any_flags.py has those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.effects import Plan, Stretch, without_effect


def told(*, ranks: int = 2, replicas: int | None = None, batches: int = 20, **settings: Any) -> str:
    """Return what is said of settings in a run that trains."""
    config = from_dict(settings)
    per_epoch = config.optimizer.steps_per_epoch(batches)
    part = Stretch(config, steps=per_epoch * config.optimizer.epochs, steps_per_epoch=per_epoch)
    plan = Plan(
        config=config,
        asked=config,
        parts=(part,),
        ranks=ranks,
        replicas=ranks if replicas is None else replicas,
        flips=True,
        side=32,
        decodes=False,
    )
    return "\n".join(without_effect(plan))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"compression": "fp16"}, {}),
        ({"partition": "dirichlet:1"}, {}),
        ({"shard_sizes": "3,1"}, {}),
        ({"freeze": "gradient-norm", "quorum": 1.0, "vote_weight": "samples", "signal": "averaged"}, {}),
        ({"strategy": "grid", "parts": 2, "pipeline": "fill-drain", "cut_by": "count"}, {"replicas": 1}),
        ({"strategy": "shared-trunk", "labels": "ride", "cut_by": "count"}, {"replicas": 1}),
        ({"freeze": "linear", "augment": "none", "cache": "on", "cache_shared": True}, {}),
        ({"strategy": "local-sgd", "local_steps": 3}, {}),
    ],
)
def test_what_ranks_share_has_an_effect_where_there_are_several(
    settings: dict[str, Any], where: dict[str, int]
) -> None:
    assert told(**settings, **where) == ""
    alone = {**settings, **({"parts": 1} if "parts" in settings else {})}
    assert "there is only one " in told(**alone, ranks=1) or "with one rank, the average" in told(**alone, ranks=1)


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"compression": "fp16", "strategy": "grid"}, {"replicas": 1}, "all ranks train on the same samples"),
        (
            {"compression": "powersgd:4", "epochs": 1},
            {"batches": 10},
            "compression starts after 10 steps, and training has 10",
        ),
        ({"strategy": "grid", "redeal": "on"}, {"replicas": 1}, "no block is frozen"),
        ({"strategy": "shared-trunk", "trunk": "whole", "labels": "ride"}, {}, "every rank runs the whole trunk"),
        ({"freeze": "linear", "cache": "auto"}, {}, "--augment fresh never repeats a view"),
        ({"augment": "none", "shuffle": "global", "cache": "auto", "freeze": "linear"}, {}, "add --cache-shared"),
        ({"statistics": "kept"}, {}, "no trained block has BatchNorm"),
        (
            {"freeze": "coherence", "min_gain": 0.1, "freeze_warmup": 900},
            {},
            "--min-gain (0.1) have no effect: there are",
        ),
        ({"strategy": "subnets", "model": "mlp-16", "augment": "none", "cache": "on"}, {}, "no block is frozen"),
    ],
)
def test_what_no_rank_reads_is_told_with_the_reason(
    settings: dict[str, Any], where: dict[str, int], words: str
) -> None:
    said = told(**settings, **where)
    assert said.startswith("--") and " no effect: " in said and words in said, said


@pytest.mark.parametrize(
    "settings",
    [
        # The command of docs/strategies/subnets.md.
        {"strategy": "subnets", "model": "resnet18", "head": "mlp-4096", "augment": "none", "cache": "on"},
        {"strategy": "local-sgd", "blocks": "residual", "freeze": "static", "cut": 2},
        {"strategy": "local-sgd", "blocks": "residual", "head_lr": "0.5"},
        {"blocks": "residual", "head_lr": "0.5"},
    ],
)
def test_nothing_is_said_of_what_a_strategy_reads(settings: dict[str, Any]) -> None:
    assert told(**settings) == ""
