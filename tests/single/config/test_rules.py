from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.settings import parse_compression
from hvfreeze.comm.world import SoloWorld
from hvfreeze.data.settings import check_shard_sizes, parse_dirichlet, parse_views
from hvfreeze.data.shards import plan_shards
from hvfreeze.data.views import parse_augment
from hvfreeze.errors import UsageError
from hvfreeze.prefix.settings import parse_bytes
from hvfreeze.training.settings import parse_cadence

VIEWS = ["views:65537", "views:0", "views:01", "views:\u0664", "views:" + "9" * 5000, "views", "flip"]
LABEL_SKEW = ["dirichlet:1e999", "dirichlet:0", "dirichlet:-1", "dirichlet:nan", "dirichlet:", "zipf:1"]
COMPRESSIONS = ["powersgd", "powersgd:0", "powersgd:04", "powersgd:257", "powersgd:\u0664", "powersgd:4 ", "bf16"]
PARSERS: list[tuple[str, Callable[[str], Any], dict[str, Any], list[str]]] = [
    ("augment", parse_views, {"fresh": ("fresh", 0), "none": ("none", 1), "views:65536": ("views", 65536)}, VIEWS),
    ("augment", parse_augment, {}, VIEWS),
    ("partition", parse_dirichlet, {"iid": None, "dirichlet:0.3": 0.3, "dirichlet:1e9": 1e9}, LABEL_SKEW),
    (
        "partition",
        lambda text: plan_shards([0], [0], size=1, batch_size=1, seed=0, shuffle="shard", partition=text),
        {},
        LABEL_SKEW,
    ),
    ("compression", parse_compression, {"auto": ("auto", 0), "powersgd:256": ("powersgd", 256)}, COMPRESSIONS),
    ("compression", lambda text: Reducer(SoloWorld(), compression=text).carry([]), {}, COMPRESSIONS),
    ("cache-limit", parse_bytes, {"none": None, "0": 0, "1.5K": 1536, "3MiB": 3 * 2**20}, ["9" * 400, "-1", "5X"]),
    ("checkpoint-every", parse_cadence, {"auto": None, "2": (2, "epochs"), "200s": (200, "steps")}, ["9" * 5000, "s"]),
    ("shard-sizes", check_shard_sizes, {"equal": None, "3,1": None}, ["1,inf", "1,nan", "0,1", "1,,1"]),
]


@pytest.mark.parametrize(("flag", "parse", "values", "refused"), PARSERS)
def test_values_are_read_or_refused_alike_by_all_who_read_them(
    flag: str, parse: Callable[[str], Any], values: dict[str, Any], refused: list[str]
) -> None:
    assert {text: parse(text) for text in values} == values
    for text in refused:
        with pytest.raises(UsageError) as refusal:
            parse(text)
        assert str(refusal.value).startswith(f"--{flag} ({text}) must be ")
