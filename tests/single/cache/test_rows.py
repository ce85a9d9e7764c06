"""Rows come back from a store with the bits, types and strides that they were appended with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.format import RowFormat, pack_keys, unpack_keys
from tests.single.cache.material import (
    BATCH_ROWS,
    fill,
    make_keys,
    make_rows,
    open_store,
    read,
    same_bits,
    slow_down,
    write_file,
)

LAYOUTS = {
    "vector": make_rows(48, shape=(5,)),
    "channels_last": make_rows(48, shape=(3, 4, 5)).contiguous(memory_format=torch.channels_last),
    "channels_last_1x1": make_rows(48, shape=(6, 1, 1)).contiguous(memory_format=torch.channels_last),
    "odd_bytes": make_rows(48, shape=(3,), dtype=torch.float16),
    "bfloat16": make_rows(48, shape=(4, 2), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shuffled_rows_come_back_with_their_bits_and_strides(layout: str, tmp_path: Path) -> None:
    rows, keys = LAYOUTS[layout], make_keys(24, views=2)
    store = open_store(tmp_path, keys)
    fill(store, keys, rows)
    order = np.random.default_rng(0).permutation(48)[:BATCH_ROWS]
    expected = torch.empty_like(rows[:BATCH_ROWS])
    expected.copy_(rows[torch.from_numpy(order)])
    for _ in ("the store that wrote them", "one that opens the file"):
        found = read(store, keys[order])
        assert found is not None and same_bits(found, expected)
        store.close()
        store = open_store(tmp_path, keys)


def test_a_batch_whose_first_dimension_is_not_the_outermost_comes_back_as_it_was(tmp_path: Path) -> None:
    tokens_first = make_rows(32, shape=(5, 6)).transpose(0, 1).contiguous().transpose(0, 1)
    batch = torch.empty_strided((BATCH_ROWS, 5, 6), (6, BATCH_ROWS * 6, 1)).copy_(tokens_first[:BATCH_ROWS])
    keys = make_keys(BATCH_ROWS)
    store = open_store(tmp_path, keys)
    store.append(keys, batch)
    found = read(store, keys)
    assert found is not None and same_bits(found, batch)
    store.close()
    small = read(open_store(tmp_path, keys, batch_rows=8), keys[:8])
    assert small is not None and small.stride() == (6, 8 * 6, 1) and torch.equal(small, batch[:8])


def test_rows_that_are_still_being_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, write_rate=2e4)
    keys, rows = make_keys(48), make_rows(48)
    store = open_store(tmp_path, keys)
    fill(store, keys, rows)
    found = read(store, keys[32:])
    assert found is not None and torch.equal(found, rows[32:])
    store.close()


def test_the_caller_may_change_a_batch_after_it_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, write_rate=2e4)
    keys, rows = make_keys(BATCH_ROWS), make_rows(BATCH_ROWS)
    store = open_store(tmp_path, keys)
    batch = rows.clone()
    store.append(keys, batch)
    batch.zero_()
    found = read(store, keys)
    assert found is not None and torch.equal(found, rows)
    store.close()


def test_a_batch_with_gaps_or_of_integers_is_not_cacheable() -> None:
    with pytest.raises(ValueError, match="strides"):
        RowFormat.of(torch.zeros(8, 3)[::2], stored=None)
    with pytest.raises(ValueError, match=r"int64.*float16"):
        RowFormat.of(torch.zeros(4, 3, dtype=torch.int64), stored=None)


def test_keys_keep_ids_and_views_apart() -> None:
    ids, views = np.array([0, 1, 2**46, 7]), np.array([0, 65535, 3, 1])
    back = unpack_keys(pack_keys(ids, views))
    assert back[0].tolist() == ids.tolist() and back[1].tolist() == views.tolist()
    for bad in (([-1], [0]), ([1 << 47], [0]), ([0], [65536]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(ValueError, match="view"):
            pack_keys(np.array(bad[0]), np.array(bad[1]))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_narrower_rows_come_back_rounded_in_the_computed_type(stored: torch.dtype, tmp_path: Path) -> None:
    rows, keys = make_rows(32, shape=(3, 2, 2)).contiguous(memory_format=torch.channels_last), make_keys(32)
    store = open_store(tmp_path, keys, stored=stored)
    fill(store, keys, rows)
    found = read(store, keys[:BATCH_ROWS])
    assert found is not None and same_bits(found, rows[:BATCH_ROWS].to(stored).float())
    assert store.row is not None and store.row.row_bytes == 24


def test_rows_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path, num_rows=20)
    keys = make_keys(40)
    store = open_store(tmp_path, keys)
    with pytest.raises(CacheFault, match="rows of"):
        store.append(keys[20:36], make_rows(BATCH_ROWS, shape=(5,)))
