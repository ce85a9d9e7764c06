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


def test_views_are_counted() -> None:
    read = {text: parse_views(text) for text in ("fresh", "none", "views:1", "views:65536")}
    assert read == {
        "fresh": ("fresh", 0),
        "none": ("none", 1),
        "views:1": ("views", 1),
        "views:65536": ("views", 65536),
    }


def test_partitions_are_read() -> None:
    assert parse_dirichlet("iid") is None
    assert parse_dirichlet("dirichlet:0.3") == 0.3
    assert parse_dirichlet("dirichlet:1e9") == 1e9


def test_compressions_are_read() -> None:
    read = [parse_compression(text) for text in ("none", "fp16", "auto", "powersgd:1", "powersgd:256")]
    assert read == [("none", 0), ("fp16", 0), ("auto", 0), ("powersgd", 1), ("powersgd", 256)]


def never_sent(text: str) -> None:
    Reducer(SoloWorld(), compression=text).carry([])


COMPRESSIONS = ["powersgd", "powersgd:0", "powersgd:04", "powersgd:257", "powersgd:\u0664", "powersgd:4 ", "bf16", ""]
VIEWS = [
    "views:70000",
    "views:65537",
    "views:0",
    "views:01",
    "views:\u0664",
    "views:" + "9" * 5000,
    "views",
    "flip",
    "",
]
PARTITIONS = [
    "dirichlet:1e999",
    "dirichlet:1e300",
    "dirichlet:0",
    "dirichlet:-1",
    "dirichlet:nan",
    "dirichlet:",
    "zipf:1",
]


def shards(text: str) -> Any:
    return plan_shards([0, 1] * 8, range(16), size=2, batch_size=1, seed=0, shuffle="shard", partition=text)


@pytest.mark.parametrize("text", VIEWS)
def test_a_bad_augment_is_refused_alike_wherever_it_is_read(text: str) -> None:
    refused_alike(text, [lambda text: DataConfig(augment=text), parse_augment], "augment")


@pytest.mark.parametrize("text", PARTITIONS)
def test_a_bad_partition_is_refused_alike_wherever_it_is_read(text: str) -> None:
    refused_alike(text, [lambda text: DataConfig(partition=text), shards], "partition")


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_a_bad_compression_is_refused_alike_wherever_it_is_read(text: str) -> None:
    refused_alike(text, [lambda text: OptimizerConfig(compression=text), never_sent], "compression")


def refused_alike(text: str, readers: list[Callable[[str], Any]], flag: str) -> None:
    messages = []
    for read in readers:
        with pytest.raises(UsageError) as refusal:
            read(text)
        messages.append(str(refusal.value))
    assert messages[0].startswith(f"--{flag} ({text}) must be ")
    assert len(set(messages)) == 1


def test_sizes_and_cadences_are_read() -> None:
    sizes = {text: parse_bytes(text) for text in ("none", "0", "1.5K", "20G", "3MiB")}
    assert sizes == {"none": None, "0": 0, "1.5K": 1536, "20G": 20 * 2**30, "3MiB": 3 * 2**20}
    assert [parse_cadence(text) for text in ("2", "200s", "0")] == [
        (2, "epochs"),
        (200, "steps"),
        (0, "epochs"),
    ]


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
