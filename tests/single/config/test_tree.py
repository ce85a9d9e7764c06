from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import hvfreeze
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.cache import parse_bytes
from hvfreeze.config.data import DataConfig, check_shard_sizes, parse_dirichlet, parse_views
from hvfreeze.config.optimizer import OptimizerConfig, parse_compression
from hvfreeze.config.registry import STRATEGIES
from hvfreeze.config.run import RunConfig, parse_cadence
from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.config.tree import Config, fields_of, from_dict, leaves, read_yaml, sections, settings_of, to_dict
from hvfreeze.data.shards import plan_shards
from hvfreeze.data.views import parse_augment
from hvfreeze.errors import UsageError
from hvfreeze.strategies.shared_trunk.settings import SharedTrunkConfig

PLAN: dict[str, Any] = {"size": 1, "batch_size": 1, "seed": 0, "shuffle": "shard"}
VIEWS = ["views:65537", "views:0", "views:01", "views:\u0664", "views:" + "9" * 5000, "views", "flip"]
SKEW = ["dirichlet:1e999", "dirichlet:0", "dirichlet:-1", "dirichlet:nan", "dirichlet:", "zipf:1"]
COMPRESSIONS = ["powersgd", "powersgd:0", "powersgd:04", "powersgd:257", "powersgd:\u0664", "powersgd:4 ", "bf16"]
PARSERS: list[tuple[str, Callable[[str], Any], dict[str, Any], list[str]]] = [
    ("augment", parse_views, {"fresh": ("fresh", 0), "none": ("none", 1), "views:65536": ("views", 65536)}, VIEWS),
    ("augment", parse_augment, {}, VIEWS),
    ("partition", parse_dirichlet, {"iid": None, "dirichlet:0.3": 0.3, "dirichlet:1e9": 1e9}, SKEW),
    ("partition", lambda text: plan_shards([0], [0], **PLAN, partition=text), {}, SKEW),
    ("compression", parse_compression, {"auto": ("auto", 0), "powersgd:256": ("powersgd", 256)}, COMPRESSIONS),
    ("compression", lambda text: Reducer(SoloWorld(), compression=text).carry([]), {}, COMPRESSIONS),
    ("cache-limit", parse_bytes, {"none": None, "0": 0, "1.5K": 1536, "3MiB": 3 * 2**20}, ["9" * 400, "-1", "5X"]),
    ("checkpoint-every", parse_cadence, {"auto": None, "2": (2, "epochs"), "9steps": (9, "steps")}, ["9" * 5000, "9s"]),
    ("shard-sizes", check_shard_sizes, {"equal": None, "3,1": None}, ["1,inf", "1,nan", "0,1", "1,,1"]),
]
EXACT = "head: multi-level\nhead_fit: exact\naugment: none"


def read(**tree: Any) -> Config:
    return from_dict(tree)


def test_settings_have_unique_names() -> None:
    kinds = [kind for name, kind in sections().items() if name != "strategy"]
    names = [leaf.name for kind in (*kinds, StrategyConfig) for leaf in dataclasses.fields(kind)]
    own = {name for kind in STRATEGIES.values() for name in fields_of(kind)}
    assert len(set(names)) == len(names) and own & {*names} == {"strategy"} and own | {*names} == set(leaves())


def test_a_grid_is_as_large_as_its_ranks() -> None:
    def parts(ranks: int, **given: int) -> int:
        return read(strategy="grid", **given).strategy.ranks_per_replica(ranks)

    found = parts(1), parts(3), parts(4, replicas=2), parts(4, parts=1), parts(6, parts=3, replicas=2)
    assert found == (1, 3, 2, 1, 3)
    for given in ({"parts": 3}, {"replicas": 3}, {"parts": 2, "replicas": 1}, {"parts": 8}):
        with pytest.raises(UsageError, match=r"--parts x --replicas .* is the number of ranks \(4\)"):
            parts(4, **given)


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"head_lr": "0.1,x"}, "head"),
        ({"strategy": "grid", "cut_by": "given", "cut_at": "2,x"}, "segment after the first"),
        ({"shard_sizes": "1,x"}, "rank"),
    ],
)
def test_a_list_that_has_words_is_refused_with_what_each_number_is_for(settings: dict[str, str], each: str) -> None:
    with pytest.raises(UsageError, match=f"must be numbers separated by commas, one per {each}$"):
        read(**settings)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Values are written as on the command line.
        ("cache: on\naugment: views:1\nquiet: on\nflips: off", {"cache": "on", "quiet": True, "flips": "off"}),
        ("lr: 1e-3\nclip_grad: .5e+1\nhead_lr: 1e-3", {"lr": 1e-3, "clip_grad": 5.0, "head_lr": "1e-3"}),
        ("lr: 2.E5\nseed: 010\ndata_seed: -010\nquiet: Off", {"lr": 2e5, "seed": 10, "data_seed": -10, "quiet": False}),
        ("lr: 1\nseed: 08\ndata_seed: 0x10\nquiet: yes", {"lr": 1.0, "seed": 8, "data_seed": 16, "quiet": True}),
        ("vote_weight: [1, 2.5]\nfreeze: linear\nepochs: 3", {"vote_weight": "1,2.5", "epochs": 3}),
        ("checkpoint_every: 3", {"checkpoint_every": "3"}),
        # Settings follow from others, unless they are given.
        ("blocks: stage", settings_of(Config().resolved())),
        ("strategy: subnets", {"momentum": 0.0}),
        ("strategy: grid\nmomentum: 0.5", {"momentum": 0.5, "blocks": "residual"}),
        ("strategy: local-critics", {"blocks": "residual"}),
        (EXACT, {"epochs": 1, "freeze": "static", "cut": 1}),
        ("freeze: auto", {"head": "multi-level", "head_fit": "kernel", "epochs": 16}),
        ("freeze: {freeze: auto, cut: 3}", {"optimizer": "auto", "lr": 3e-4, "schedule": "cosine"}),
        ("freeze: auto\nepochs: 4\nhead: last", {"head": "last", "epochs": 4, "head_fit": "exact"}),
        ("freeze: auto\nlr: 0.2\ncache: on", {"lr": 0.2, "optimizer": "adamw"}),
        ("freeze: auto\noptimizer: sgd", {"lr": 0.1}),
        # Files of earlier versions have names and sections of their time.
        ("head: {mirror: off, head: multi-level, head_fit: exact, pool: 2}\naugment: none", {"flips": "off"}),
        ("data: {flips: on}\nhead: {mirror: off}", {"flips": "on"}),
        ("checkpoint_every: 200s", {"checkpoint_every": "200steps"}),
        ("run: {checkpoint_every: 4s}", {"checkpoint_every": "4steps"}),
    ],
)
def test_a_file_makes_settings_and_they_survive_in_one(tmp_path: Path, text: str, wanted: dict[str, Any]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    config = from_dict(read_yaml(file))
    found = settings_of(config.resolved())
    assert {name: (found[name], type(found[name])) for name in wanted} == {
        name: (value, type(value)) for name, value in wanted.items()
    }
    for kept in (config, config.resolved()):
        file.write_text(yaml.safe_dump(to_dict(kept)))
        assert from_dict(read_yaml(file)) == kept


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (OptimizerConfig, {"epochs": 1.0}, "OptimizerConfig: epochs (1.0) must be a whole number"),
        (OptimizerConfig, {"lr": "0.1"}, "lr ('0.1') must be a number"),
        (OptimizerConfig, {"lr": 10**400}, "--lr (inf) must be a positive number"),
        (DataConfig, {"flips": False}, "flips (False) must be text; put flips in quotes"),
        (DataConfig, {"train_samples": np.ones(2)}, "train_samples (array([1., 1.])) must be a whole number"),
        (DataConfig, {"augment": None}, "augment (None) must be text"),
        (RunConfig, {"quiet": "no"}, "quiet ('no') must be true or false"),
        (RunConfig, {"run_dir": b"runs"}, "run_dir (b'runs') must be text"),
        (RunConfig, {"run_dir": "a\0b"}, r"run_dir ('a\x00b') must be text without NUL characters"),
        (RunConfig, {"threads": 10**30}, "must be at least 1 and at most"),
        (Config, {"model": "resnet18"}, "Config: model ('resnet18') must be of type ModelConfig"),
        (hvfreeze.train, {"config": {"model": "resnet18"}}, "config must be a hvfreeze.Config, not dict"),
        (read, {"lr": 0.1, "optimizer": {"lr": 0.2}}, "'lr' is given twice; leave one"),
        (read, {"batch-size": 4, "batch_size": 8}, "'batch_size' is given twice; leave one"),
        (read, {"data": {"pool": 2}}, "unknown key 'pool'"),
        (read, {"optimizer": {"learning-rate": 0.1}}, "unknown key 'learning_rate'; did you mean 'lr'?"),
        (DataConfig, {"mean": "0.5"}, "--mean (0.5) must be given together with --std"),
        (DataConfig, {"std": "0.5"}, "--std (0.5) must be given together with --mean"),
        (read, {"freeze": "auto", "strategy": "grid"}, "--strategy (grid) must be replicas in hvfreeze auto"),
        (read, {"freeze": "auto", "head": "last", "head_fit": "sgd"}, "--head-fit (sgd) must be exact or kernel in"),
    ],
)
def test_wrong_settings_are_refused_however_they_are_given(
    make: Callable[..., Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        make(**given)
    assert words in str(refusal.value)


def test_paths_and_the_numbers_of_numpy_and_torch_are_taken() -> None:
    config = Config(
        run=RunConfig(run_dir=Path("runs/one"), seed=np.int64(3)),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=torch.tensor(0.5), epochs=np.int32(2)),  # type: ignore[arg-type]
    )
    assert from_dict({"run_dir": "runs/one", "seed": 3, "lr": 0.5, "epochs": 2}) == config
    assert (type(config.run.run_dir), type(config.optimizer.lr), type(config.run.seed)) == (str, float, int)
    assert RunConfig(run_dir="") == RunConfig(), "an empty path is none"
    trunk = from_dict({"strategy": "shared-trunk", "head_lr": "0.1,0.2", "cut_by": "given", "cut_at": 2})
    assert trunk.optimizer.head_rates() == [0.1, 0.2] and SharedTrunkConfig.of(trunk).starts() == [2]


@pytest.mark.parametrize(("flag", "parse", "values", "refused"), PARSERS)
def test_values_are_read_or_refused_alike_by_all_who_read_them(
    flag: str, parse: Callable[[str], Any], values: dict[str, Any], refused: list[str]
) -> None:
    assert {text: parse(text) for text in values} == values
    for text in refused:
        with pytest.raises(UsageError) as refusal:
            parse(text)
        assert str(refusal.value).startswith(f"--{flag} ({text}) must be ")
