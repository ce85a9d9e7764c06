from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import hvfreeze
from hvfreeze.config.tree import (
    Config,
    fields_of,
    from_dict,
    leaves,
    read_yaml,
    sections,
    to_dict,
)
from hvfreeze.data.settings import DataConfig
from hvfreeze.errors import UsageError
from hvfreeze.section import Section
from hvfreeze.strategies.registry import STRATEGIES
from hvfreeze.strategies.settings import StrategyConfig
from hvfreeze.strategies.shared_trunk.settings import SharedTrunkConfig
from hvfreeze.training.settings import OptimizerConfig, RunConfig


def test_leaves_have_names_of_their_own_and_a_text_each() -> None:
    kinds = [kind for name, kind in sections().items() if name != "strategy"]
    names = [leaf.name for kind in (*kinds, StrategyConfig) for leaf in dataclasses.fields(kind)]
    own = {name for kind in STRATEGIES.values() for name in fields_of(kind)}
    assert len(set(names)) == len(names) and own & {*names} == {"strategy"} and own | {*names} == set(leaves())
    assert all(leaf.metadata["help"] for _, leaf, _ in leaves().values())


def test_a_configuration_survives_being_a_dict() -> None:
    config = from_dict({"lr": 1, "strategy": "replicas", "vote_weight": [1, 2.5], "freeze": "linear"})
    assert config.optimizer.lr == 1.0 and config.freeze.vote_weight == "1,2.5"
    assert from_dict(to_dict(config)) == config


def test_a_strategys_flags_are_taken() -> None:
    given = {"strategy": "shared-trunk", "heads": 2, "head_lr": "0.1,0.2", "cut_by": "given", "cut_at": 2}
    config = from_dict(given)
    assert config.optimizer.head_rates() == [0.1, 0.2] and SharedTrunkConfig.of(config).starts() == [2]


def test_a_grid_is_as_large_as_its_ranks() -> None:
    def parts(ranks: int, **given: int) -> int:
        return from_dict({"strategy": "grid", **given}).strategy.ranks_per_replica(ranks)

    assert (parts(1), parts(3), parts(4, replicas=2), parts(4, parts=1), parts(6, parts=3, replicas=2)) == (
        1,
        3,
        2,
        1,
        3,
    )
    for given in ({"parts": 3}, {"replicas": 3}, {"parts": 2, "replicas": 1}, {"parts": 8}):
        with pytest.raises(UsageError, match=r"--parts x --replicas .* is the number of ranks \(4\)"):
            parts(4, **given)
    assert from_dict({"strategy": "grid"}).resolved().model.blocks == "residual"
    assert from_dict({"strategy": "local-critics"}).resolved().model.blocks == "residual"


def test_a_strategy_has_defaults_of_its_own() -> None:
    assert [from_dict(given).optimizer.momentum for given in ({}, {"strategy": "subnets"})] == [0.9, 0.0]
    assert from_dict({"strategy": "subnets", "momentum": 0.5}).optimizer.momentum == 0.5


def test_an_exact_head_settles_the_epochs_and_the_cut_and_goes_round_through_a_file() -> None:
    resolved = from_dict({"head": "multi-level", "head_fit": "exact", "augment": "none"}).resolved()
    assert (resolved.optimizer.epochs, resolved.freeze.freeze, resolved.freeze.cut) == (1, "static", 1)
    assert from_dict(to_dict(resolved)).resolved() == resolved
    assert Config().resolved() == from_dict({"blocks": "stage"})


def test_auto_has_its_own_defaults_which_give_way_to_what_is_given() -> None:
    config = from_dict({"freeze": "auto"})
    assert (config.head.head, config.head.head_fit, config.optimizer.epochs) == ("multi-level", "kernel", 16)
    assert (config.optimizer.optimizer, config.optimizer.lr, config.optimizer.schedule) == ("auto", 3e-4, "cosine")
    given = from_dict({"freeze": {"freeze": "auto", "cut": 3}, "epochs": 4, "head": "last", "lr": 0.1, "cache": "on"})
    assert (given.head.head, given.optimizer.epochs, given.optimizer.lr) == ("last", 4, 0.1)
    assert given.optimizer.optimizer == "adamw", "a rate is one optimizer's, and was AdamW's"
    assert given.resolved().head.head_fit == "exact", "the model's own last layer compares no rows"
    assert from_dict({"freeze": "auto", "optimizer": "sgd"}).optimizer.lr == 0.1, "a rate of AdamW is not SGD's"
    assert from_dict(to_dict(given)).resolved() == given.resolved()


def test_a_strategy_does_not_go_with_auto() -> None:
    with pytest.raises(UsageError, match=r"--strategy \(shared-trunk\) must be replicas in hvfreeze auto"):
        from_dict({"freeze": "auto", "strategy": "shared-trunk"})


@pytest.mark.parametrize(
    ("text", "leaf", "value"),
    [
        ("cache: on\naugment: none", "cache", "on"),
        ("flips: off", "flips", "off"),
        ("quiet: on", "quiet", True),
        ("quiet: Off", "quiet", False),
        ("quiet: yes", "quiet", True),
        ("quiet: true", "quiet", True),
        ("lr: 1e-3", "lr", 1e-3),
        ("lr: 2.E5", "lr", 2e5),
        ("clip_grad: .5e+1", "clip_grad", 5.0),
        ("head_lr: 1e-3", "head_lr", "1e-3"),
        ("seed: 010", "seed", 10),
        ("seed: 08", "seed", 8),
        ("data_seed: -010", "data_seed", -10),
        ("seed: 0x10", "seed", 16),
    ],
)
def test_values_are_written_in_a_file_as_on_the_command_line(
    tmp_path: Path, text: str, leaf: str, value: object
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    config = from_dict(read_yaml(tmp_path / "config.yaml"))
    found = {name: entry for section in to_dict(config).values() for name, entry in section.items()}[leaf]
    assert (found, type(found)) == (value, type(value))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    assert from_dict(read_yaml(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize("tree", [{"lr": 0.1, "optimizer": {"lr": 0.2}}, {"batch-size": 4, "batch_size": 8}])
def test_a_setting_that_is_given_twice_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is given twice; leave one"):
        from_dict(tree)


def test_a_setting_that_older_files_have_in_another_section_is_found() -> None:
    found = from_dict(
        {"head": {"mirror": "off", "head": "multi-level", "head_fit": "exact", "pool": 2}, "augment": "none"}
    )
    assert (found.data.flips, found.head.pool) == ("off", 2)
    assert from_dict({"data": {"flips": "on"}, "head": {"mirror": "off"}}).data.flips == "on", "what is newer counts"
    with pytest.raises(UsageError, match="unknown key 'pool'"):
        from_dict({"data": {"pool": 2}})


@pytest.mark.parametrize(
    ("section", "leaf", "value", "words"),
    [
        (OptimizerConfig, "epochs", 1.0, r"OptimizerConfig: epochs \(1.0\) must be of type int"),
        (OptimizerConfig, "lr", "0.1", r"lr \('0.1'\) must be of type float"),
        (DataConfig, "flips", False, r"flips \(False\) must be of type str; put flips in quotes"),
        (OptimizerConfig, "lr", 10**400, r"--lr \(inf\) must be a positive number"),
        (DataConfig, "train_samples", np.ones(2), r"train_samples .* must be of type int"),
        (DataConfig, "augment", None, r"augment \(None\) must be of type str"),
        (RunConfig, "quiet", "no", r"quiet \('no'\) must be of type bool"),
        (RunConfig, "run_dir", b"runs", r"run_dir \(b'runs'\) must be of type str"),
        (RunConfig, "run_dir", "a\0b", r"run_dir \('a\\x00b'\) must be text without NUL characters"),
    ],
)
def test_a_value_of_another_type_is_refused_however_a_section_is_made(
    section: type[Section], leaf: str, value: object, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        section(**{leaf: value})


def test_paths_and_the_numbers_of_numpy_and_torch_are_taken() -> None:
    config = Config(
        run=RunConfig(run_dir=Path("runs/one"), seed=np.int64(3)),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=torch.tensor(0.5), epochs=np.int32(2)),  # type: ignore[arg-type]
    )
    assert (config.run.run_dir, config.run.seed) == ("runs/one", 3)
    assert (config.optimizer.lr, type(config.optimizer.lr), config.optimizer.epochs) == (0.5, float, 2)
    assert from_dict(to_dict(config)) == config


def test_an_empty_run_directory_is_none() -> None:
    assert RunConfig(run_dir="") == RunConfig()
    with pytest.raises(UsageError, match=r"--resume \(True\) must be given together with --run-dir DIR"):
        RunConfig(run_dir="", resume=True)


def test_what_is_no_section_and_no_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Config: model \('resnet18'\) must be of type ModelConfig"):
        Config(model="resnet18")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"config must be a hvfreeze\.Config, not dict"):
        hvfreeze.train({"model": "resnet18"})
