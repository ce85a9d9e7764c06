from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.settings import parse_compression
from hvfreeze.comm.world import SoloWorld
from hvfreeze.data.settings import DataConfig, parse_dirichlet, parse_views
from hvfreeze.data.shards import plan_shards
from hvfreeze.data.views import parse_augment
from hvfreeze.errors import UsageError
from hvfreeze.prefix.settings import CacheConfig, parse_bytes
from hvfreeze.training.settings import OptimizerConfig, RunConfig, parse_cadence

READ: list[tuple[Callable[[str], Any], dict[str, Any]]] = [
    (
        parse_views,
        {"fresh": ("fresh", 0), "none": ("none", 1), "views:1": ("views", 1), "views:65536": ("views", 65536)},
    ),
    (parse_dirichlet, {"iid": None, "dirichlet:0.3": 0.3, "dirichlet:1e9": 1e9}),
    (
        parse_compression,
        {"none": ("none", 0), "fp16": ("fp16", 0), "auto": ("auto", 0), "powersgd:256": ("powersgd", 256)},
    ),
    (parse_bytes, {"none": None, "0": 0, "1.5K": 1536, "20G": 20 * 2**30, "3MiB": 3 * 2**20}),
    (parse_cadence, {"auto": None, "2": (2, "epochs"), "200s": (200, "steps"), "0": (0, "epochs")}),
]


@pytest.mark.parametrize(("parse", "values"), READ)
def test_values_are_read(parse: Callable[[str], Any], values: dict[str, Any]) -> None:
    assert {text: parse(text) for text in values} == values


def shards(text: str) -> Any:
    return plan_shards([0, 1] * 8, range(16), size=2, batch_size=1, seed=0, shuffle="shard", partition=text)


REFUSED: dict[str, tuple[list[Callable[[str], Any]], list[str]]] = {
    "augment": (
        [lambda text: DataConfig(augment=text), parse_augment],
        ["views:65537", "views:0", "views:01", "views:\u0664", "views:" + "9" * 5000, "views", "flip"],
    ),
    "partition": (
        [lambda text: DataConfig(partition=text), shards],
        ["dirichlet:1e999", "dirichlet:0", "dirichlet:-1", "dirichlet:nan", "dirichlet:", "zipf:1"],
    ),
    "compression": (
        [lambda text: OptimizerConfig(compression=text), lambda text: Reducer(SoloWorld(), compression=text).carry([])],
        ["powersgd", "powersgd:0", "powersgd:04", "powersgd:257", "powersgd:\u0664", "powersgd:4 ", "bf16"],
    ),
}


@pytest.mark.parametrize(("flag", "text"), [(flag, text) for flag, (_, texts) in REFUSED.items() for text in texts])
def test_a_bad_value_is_refused_alike_wherever_it_is_read(flag: str, text: str) -> None:
    messages = set()
    for read in REFUSED[flag][0]:
        with pytest.raises(UsageError) as refusal:
            read(text)
        messages.add(str(refusal.value))
    assert len(messages) == 1 and messages.pop().startswith(f"--{flag} ({text}) must be ")


@pytest.mark.parametrize(
    "build",
    [
        lambda: CacheConfig(cache_limit="9" * 400),
        lambda: RunConfig(checkpoint_every="9" * 5000),
        lambda: RunConfig(threads=10**30),
        lambda: DataConfig(shard_sizes="1,inf"),
    ],
    ids=["cache-limit", "checkpoint-every", "threads", "shard-sizes"],
)
def test_a_number_beyond_all_measure_is_a_usage_error(build: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="must be"):
        build()
