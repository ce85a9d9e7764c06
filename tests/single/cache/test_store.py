"""What a store has of its rows: its own files, those of other ranks and runs, exact or not, partial or whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import torch

from hvfreeze.cache.file.reader import ActivationFile
from tests.single.cache.material import (
    BATCH_ROWS,
    fill,
    make_fingerprint,
    make_keys,
    make_rows,
    open_store,
    read,
    write_file,
)


def test_a_partial_file_is_used_for_what_it_holds_and_completed_by_a_new_generation(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    first = open_store(tmp_path, keys)
    fill(first, keys[10:26], rows[10:26])
    first.close()
    before = os.stat(first.path).st_ino
    second = open_store(tmp_path, keys)
    assert int(second.missing(keys).sum()) == 24 and second.rows_to_complete == 16
    found = read(second, keys[10:26])
    assert found is not None and torch.equal(found, rows[10:26])
    fill(second, keys, rows)
    second.close()
    assert os.stat(first.path).st_ino != before
    third = open_store(tmp_path, keys)
    found = read(third, keys[::-1][:BATCH_ROWS].copy())
    assert (
        third.complete
        and third.rows_to_complete == 0
        and found is not None
        and torch.equal(found, rows.flip(0)[:BATCH_ROWS])
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.path.name]


def test_a_rank_reads_the_rows_of_others_only_when_sharing(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    mine = [open_store(tmp_path, keys[rank::2], shard=f"{rank}of2", shared=True) for rank in range(2)]
    for rank, store in enumerate(mine):
        fill(store, keys[rank::2], rows[rank::2].contiguous())
        store.publish()
    for store in mine:
        store.refresh()
        found = read(store, keys[:BATCH_ROWS])
        assert found is not None and torch.equal(found, rows[:BATCH_ROWS])
        store.close()
    alone = open_store(tmp_path, keys[0::2], shard="0of2")
    assert alone.complete and alone.missing(keys[1::2]).all()


def test_rows_computed_from_inexact_rows_make_the_file_inexact(tmp_path: Path) -> None:
    keys, rows = make_keys(32), make_rows(32)
    store = open_store(tmp_path, keys)
    store.append(keys[:16], rows[:16])
    assert store.exact
    store.append(keys[16:], rows[16:], exact=False)
    assert not store.exact
    store.close()
    assert not open_store(tmp_path, keys).exact


def test_deleting_leaves_files_of_other_owners(tmp_path: Path) -> None:
    path = write_file(tmp_path, owner="earlier")
    store = open_store(tmp_path, make_keys(40), owner="later")
    store.delete()
    assert path.exists() and read(store, make_keys(16)) is not None
    nameless = write_file(tmp_path, fingerprint=make_fingerprint(cut=3))
    open_store(tmp_path, make_keys(40), fingerprint=make_fingerprint(cut=3)).delete()
    assert nameless.exists()
    same = open_store(tmp_path, make_keys(40), owner="earlier")
    same.delete()
    assert not path.exists()
    assert read(same, make_keys(16)) is not None


def test_plain_h5py_reads_the_file_as_documented(tmp_path: Path) -> None:
    keys, rows = make_keys(20), make_rows(20, shape=(3, 2, 2)).contiguous(memory_format=torch.channels_last)
    store = open_store(tmp_path, keys, stored=torch.bfloat16)
    fill(store, keys[:16], rows[:16])
    store.close()
    assert ActivationFile(store.path).manifest.fingerprint == make_fingerprint()
    with h5py.File(store.path) as file:
        written = file["sample_ids"][:] >= 0
        assert written.tolist() == [True] * 16 + [False] * 4
        assert (file["sample_ids"][:16] << 16 | file["views"][:16]).tolist() == keys[:16].tolist()
        assert file["activations"].dtype == np.uint16 and file["activations"].shape == (20, 2, 2, 3)
        assert file["activations"].attrs["dtype"] == b"bfloat16"
        assert file["activations"].attrs["dimension_order"] == b"2,3,1"
        raw = torch.from_numpy(file["activations"][:16].view(np.int16)).view(torch.bfloat16)
        assert torch.equal(raw.permute(0, 3, 1, 2), rows[:16].bfloat16())
        manifest = json.loads(bytes(file["manifest"][:]))
        assert manifest["identity"] == make_fingerprint().fields and manifest["rows"] == 16
        assert file.attrs["format"] == b"hvfreeze activation cache" and file.attrs["cut"] == b"2"


def test_a_partial_file_of_other_batch_rows_stays_inexact_when_it_is_completed(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    first = open_store(tmp_path, keys, fingerprint=make_fingerprint(threads=2))
    fill(first, keys[:16], rows[:16])
    first.close()
    second = open_store(tmp_path, keys)
    fill(second, keys, rows)
    assert not second.exact
    second.close()
    assert not open_store(tmp_path, keys).exact
    assert not open_store(tmp_path, keys, fingerprint=make_fingerprint(threads=2)).exact
