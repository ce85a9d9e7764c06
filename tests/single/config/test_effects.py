"""Notes on settings without effect that depend on ranks; tests/single/test_any_flags.py has those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.effects import Plan, Stretch, without_effect

Settings = dict[str, Any]


PATIENT = {"epochs": 10, "validation_fraction": 0.1}
WEIGHTED = {"class_weights": "balanced"}
EXACT = {"head": "multi-level", "head_fit": "exact", "augment": "none"}


def notes(
    settings: Settings, *, ranks: int = 2, replicas: int | None = None, batches: int = 20, flips: bool = True
) -> str:
    """Return the notes on a run of `train`."""
    config = from_dict(settings)
    per_epoch = config.optimizer.steps_per_epoch(batches)
    part = Stretch(config, steps=per_epoch * config.optimizer.epochs, steps_per_epoch=per_epoch)
    known = {"flips": flips, "side": 32, "decodes": False, "ranks": ranks, "replicas": replicas or ranks}
    return "\n".join(without_effect(Plan(config=config, asked=config, parts=(part,), **known)))


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
def test_settings_that_ranks_share_have_an_effect_with_several_ranks_only(settings: Settings, where: Settings) -> None:
    assert notes(settings, **where) == ""
    alone = notes(settings | ({"parts": 1} if "parts" in settings else {}), ranks=1)
    assert " no effect: there is only one rank" in alone, alone


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"compression": "fp16", "strategy": "grid"}, {"replicas": 1}, "all ranks train on the same samples"),
        ({"compression": "powersgd:4", "epochs": 1}, {"batches": 10}, "starts after 10 steps, and training has 10"),
        ({"strategy": "grid", "redeal": "on"}, {"replicas": 1}, "no block is frozen"),
        ({"strategy": "shared-trunk", "trunk": "whole", "labels": "ride"}, {}, "every rank runs the whole trunk"),
        ({"freeze": "linear", "cache": "auto"}, {}, "--augment fresh never repeats a view"),
        ({"augment": "none", "shuffle": "global", "cache": "auto", "freeze": "linear"}, {}, "add --cache-shared"),
        ({"flips": "on"}, {"flips": False}, "a flipped image of digits may not belong to the same class"),
        ({"statistics": "kept"}, {}, "no trained block has BatchNorm"),
        ({"freeze": "coherence", "min_gain": 0.1, "freeze_warmup": 900}, {}, "(0.1) have no effect: there are no vot"),
        ({"strategy": "subnets", "model": "mlp-16", "augment": "none", "cache": "on"}, {}, "no block is frozen"),
        # The command of docs/strategies/subnets.md.
        ({"strategy": "subnets", "model": "resnet18", "head": "mlp-4", "augment": "none", "cache": "on"}, {}, ""),
        (PATIENT | {"early_stop": 9}, {}, "there are 10 evaluations, and the first is always the best so far"),
        (PATIENT | {"early_stop": 8}, {}, ""),
        (PATIENT | WEIGHTED | {"early_stop": 2}, {}, "of 10 evaluations, 2 are made once class weights apply"),
        (PATIENT | WEIGHTED | {"early_stop": 1}, {}, ""),
        ({"strategy": "local-sgd", "blocks": "residual", "freeze": "static", "cut": 2}, {}, ""),
        ({"strategy": "local-sgd", "blocks": "residual", "head_lr": "0.5"}, {}, ""),
        ({"blocks": "residual", "head_lr": "0.5"}, {}, ""),
    ],
)
def test_a_setting_without_effect_has_a_note_with_the_reason(settings: Settings, where: Settings, words: str) -> None:
    found = notes(settings, **where)
    assert words in found and bool(words) == (" no effect: " in found) == found.startswith("--"), found


def test_a_reason_does_not_name_the_setting_again() -> None:
    config = from_dict({"freeze": "auto", "epochs": 2, "shuffle": "global", "lr": 0.1})
    known = {"flips": True, "side": 32, "decodes": False, "ranks": 1, "replicas": 1}
    alone = without_effect(Plan(config=config, asked=config, parts=(Stretch(from_dict(EXACT)),), **known))
    assert "--epochs (2) has limited effect: it leaves room only for fitting the head" in alone
    assert "--shuffle (global), --lr (0.1) have no effect: --epochs (2) leaves room only for fitting the head" in alone
