"""Properties of votes, shards, views and fingerprints for values that a machine makes up, and readers of junk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.fingerprint import Fingerprint
from hvfreeze.data.folders import list_folders
from hvfreeze.data.shards import apportion, plan_shards
from hvfreeze.data.views import parse_augment
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.freezing.vote import count, deepest_supported, fixed_point
from hvfreeze.plain_yaml import parse_plain_yaml
from hvfreeze.runs import checkpoint_file as checkpoint
from hvfreeze.runs.reading import read_config, read_lines, read_object
from tests.single.cache.material import write_file
from tests.single.training.forging import save_sections

FEW, MANY = 20, 100_000
DEEPEST = 6
Property = Callable[[], None]

ranks = st.lists(st.tuples(st.integers(0, DEEPEST), st.integers(0, 2**20)), min_size=1, max_size=8)
quorums = st.sampled_from(["0.1", "0.25", "0.3", "0.5", "0.51", "0.75", "1.0"])
names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda name: len(name.encode()) < 200 and name not in (".", "..")
)
words = st.text("aZ0 _.\0\u00e9\u4e00\U0001f600", max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def tally_of(table: list[tuple[int, int]], *, scale: float = 1.0) -> list[int]:
    largest = max(weight for _, weight in table) * scale
    proposals, weights = zip(*table, strict=True)
    return count(proposals, [fixed_point(weight * scale, largest) for weight in weights], deepest=DEEPEST)


@given(table=ranks, quorum=quorums, cut=st.integers(0, DEEPEST), order=st.randoms(), power=st.integers(-60, 60))
def votes(table: list[tuple[int, int]], quorum: str, cut: int, order: Any, power: int) -> None:
    tally = tally_of(table)
    found = deepest_supported(tally, quorum=float(quorum), cut=cut)
    # One process, exact fractions, no ballots: the weight behind a cut, and the deepest that has the quorum.
    units = [fixed_point(weight, max(w for _, w in table)) for _, weight in table]
    behind = {k: sum(u for (p, _), u in zip(table, units, strict=True) if p >= k) for k in range(DEEPEST + 1)}
    supported = [k for k, weight in behind.items() if weight >= Fraction(quorum) * sum(units)]
    assert found == (max(supported) if sum(units) else cut)
    shuffled = list(table)
    order.shuffle(shuffled)
    assert tally_of(shuffled) == tally
    if any(weight for _, weight in table):
        assert tally_of(table, scale=2.0**power) == tally
    assert all(shallower >= deeper for shallower, deeper in pairwise(tally))


@given(
    labels=st.lists(st.integers(0, 4), min_size=8, max_size=80),
    size=st.integers(1, 6),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.sampled_from(["shard", "global"]),
    alpha=st.sampled_from(["iid", "dirichlet:0.1", "dirichlet:5"]),
    epoch=st.integers(0, 3),
)
def sharding(labels: list[int], size: int, batch: int, seed: int, shuffle: str, alpha: str, epoch: int) -> None:
    ids = np.arange(len(labels), dtype=np.int64)
    try:
        plan = plan_shards(labels, ids, size=size, batch_size=batch, seed=seed, shuffle=shuffle, partition=alpha)
    except UsageError:
        # One of the ways to refuse; all shards are as large as they can be alike.
        assert len(labels) // size < batch or (shuffle == "global" and alpha != "iid")
        return
    if shuffle == "shard":
        assert np.array_equal(np.sort(np.concatenate(plan.shards)), ids), "each sample has one owner"
    met = np.concatenate([plan.epoch_order(epoch, rank).reshape(-1) for rank in range(size)])
    assert plan.batches_per_epoch >= 1 and len(met) == plan.batches_per_epoch * batch * size
    assert len(np.unique(met)) == len(met), "no sample is met twice in an epoch"
    assert np.array_equal(plan.epoch_order(epoch, 0), plan.epoch_order(epoch, 0))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any), st.integers(0, 60))
def apportioning(weights: list[int], total: int) -> None:
    seats = np.bincount(apportion(weights, total), minlength=len(weights))
    assert seats.sum() == total
    assert all(seats[place] == 0 for place, weight in enumerate(weights) if weight == 0)


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 50), st.integers(0, 9)
)
def views(samples: list[int], num_views: int, epoch: int, seed: int) -> None:
    ids, augment = np.array(samples, dtype=np.int64), parse_augment(f"views:{num_views}")
    shown = np.stack([augment.view_of(ids, epoch=epoch + more, data_seed=seed) for more in range(num_views)])
    assert np.array_equal(np.sort(shown, axis=0), np.repeat(np.arange(num_views)[:, None], len(ids), axis=1))
    alone = augment.view_of(ids[:1], epoch=epoch, data_seed=seed)
    assert alone[0] == shown[0, 0], "a sample's view does not depend on the batch that it is in"


@given(st.dictionaries(words, plain, min_size=1, max_size=6), st.data())
def fingerprints(fields: dict[str, Any], data: st.DataObject) -> None:
    fingerprint = Fingerprint.of(fields)
    assert Fingerprint.of(dict(reversed(fields.items()))).differences(fingerprint) == ()
    name = data.draw(st.sampled_from(sorted(fields)))
    changed = Fingerprint.of({**fields, name: data.draw(plain)})
    same = changed.fields[name] == fingerprint.fields[name] and repr(changed.fields[name]) == repr(
        fingerprint.fields[name]
    )
    assert same or changed.differences(fingerprint) == (name,) or changed.fields[name] == fingerprint.fields[name]
    assert "another" in Fingerprint.of({**fields, "another": 1}).differences(fingerprint) or "another" in fields


HELD = tempfile.TemporaryDirectory(prefix="hvfreeze-properties-")
FOLDER = Path(HELD.name)
"""Examples of a property share one folder: a test's own would be made for all of them at once."""


def only(kinds: type[Exception] | tuple[type[Exception], ...], read: Callable[[], object]) -> None:
    """Whatever is read, there is an answer or a refusal."""
    try:
        read()
    except kinds as refusal:
        assert str(refusal)


junk = st.binary(max_size=300) | st.text(max_size=120).map(str.encode)


@given(junk)
@example(b"&a [*a]")
@example(b"a: &a [b]\nc: *a")
@example(b"!!python/object/apply:os.system [true]")
@example(b"{" * 5000)
def yaml_files(content: bytes) -> None:
    only(ValueError, lambda: parse_plain_yaml(content))


@given(junk, st.sampled_from(["config.yaml", "summary.json", "metrics.jsonl"]))
@example(b'{"epoch": 1e999}\n', "metrics.jsonl")
@example(b"[" * 100_000, "summary.json")
def run_files(content: bytes, name: str) -> None:
    path = FOLDER / name
    path.write_bytes(content)
    readers = {
        "config.yaml": read_config,
        "summary.json": lambda p: read_object(p, ()),
        "metrics.jsonl": lambda p: read_lines(p, ()),
    }
    only(HvfreezeError, lambda: readers[name](path))


@given(junk, st.integers(0, 2**20), st.booleans())
def checkpoint_files(content: bytes, place: int, append: bool) -> None:
    sound = save_sections(FOLDER, [checkpoint.packed({"step": 1}), checkpoint.packed({"rank": 0})], step=1)
    whole = sound.read_bytes()
    at = place % len(whole)
    damaged = whole[:at] + content + whole[at + (0 if append else len(content)) :]
    path = FOLDER / "damaged.pt"
    path.write_bytes(damaged)

    def read() -> None:
        opened = checkpoint.open_checkpoint(path, size=None)
        assert damaged == whole, "other bytes are taken for a checkpoint"
        for number in range(opened.size + 1):
            checkpoint.unpacked(opened.section(number), name=str(path))

    only(RefusedError, read)


@given(junk, st.integers(0, 2**20), st.booleans())
def cache_files(content: bytes, place: int, append: bool) -> None:
    sound = FOLDER / "sound"
    if not sound.exists():
        sound.write_bytes(write_file(FOLDER / "cache").read_bytes())
    whole = sound.read_bytes()
    at = place % len(whole)
    path = FOLDER / "damaged.h5"
    path.write_bytes(whole[:at] + content + whole[at + (0 if append else len(content)) :])
    path.chmod(0o600)
    child = os.fork()
    if child == 0:
        # The HDF5 library may crash on a damaged file, which is no silence.
        code = 1
        try:
            ActivationFile(path).verify()
            code = 0
        except CacheFault:
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0


@given(st.dictionaries(names, st.lists(names, max_size=3), max_size=4))
def trees(tree: dict[str, list[str]]) -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as made:
        root = Path(made)
        for folder, files in tree.items():
            try:
                (root / folder).mkdir()
                for name in files:
                    (root / folder / f"{name}.png").write_bytes(b"no image")
            except (OSError, ValueError):
                return
        only(HvfreezeError, lambda: list_folders(root))


CHEAP = [votes, sharding, apportioning, views, fingerprints, yaml_files, run_files]
DEAR = [checkpoint_files, cache_files, trees]


def check(holds: Property, *, examples: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=quiet)(
        holds
    )()


@pytest.mark.parametrize("holds", CHEAP + DEAR, ids=lambda holds: holds.__name__)
def test_what_must_hold_for_every_value_holds_for_a_few(holds: Property) -> None:
    check(holds, examples=FEW if holds in CHEAP else FEW // 2)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("holds", CHEAP + DEAR, ids=lambda holds: holds.__name__)
def test_what_must_hold_for_every_value_holds_for_many(holds: Property) -> None:
    check(holds, examples=MANY if holds is votes else MANY // (10 if holds in CHEAP else 50))
