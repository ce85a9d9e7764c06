from __future__ import annotations

import dataclasses
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.format import NAMES, PAYLOAD
from hvfreeze.cache.file.hdf5 import find_regions, make_frame
from hvfreeze.cache.file.reader import ActivationFile, MappedRows
from tests.single.cache.material import (
    fill,
    make_fingerprint,
    make_keys,
    make_rows,
    open_store,
    read,
    run_in_child,
    write_file,
)

WIDE = (1 << 17,)  # half a MiB: two rows are a range


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.5, 0.9999])
def test_a_truncated_file_is_refused_at_any_length(kept: float, tmp_path: Path) -> None:
    path = write_file(tmp_path, num_rows=6, shape=(1 << 12,))
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(CacheFault, match=str(path)):
        ActivationFile(path).verify()


def payload_of(path: Path) -> tuple[int, int]:
    """Offset of the first row, and bytes of a row."""
    descriptor, regions = find_regions(path, names=NAMES)
    os.close(descriptor)
    return regions[PAYLOAD].offset, regions[PAYLOAD].nbytes // regions[PAYLOAD].shape[0]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_equal_ranges_have_different_digests_at_another_place_and_under_another_fingerprint(tmp_path: Path) -> None:
    digests = []
    for fingerprint in (make_fingerprint(), make_fingerprint(prefix="q" * 64)):
        store = open_store(tmp_path, make_keys(8), fingerprint=fingerprint)
        fill(store, make_keys(8), torch.ones(8, *WIDE))
        store.close()
        descriptor, regions = find_regions(store.path, names=NAMES)
        table = os.pread(descriptor, regions["range_sha256"].nbytes, regions["range_sha256"].offset)
        os.close(descriptor)
        digests += [table[at : at + 32] for at in range(0, len(table), 32)]
    assert len(digests) == len(set(digests)) == 8


@pytest.mark.parametrize("kept", [0.0, 0.99])
def test_a_file_truncated_while_it_is_open_is_noticed(kept: float, tmp_path: Path) -> None:
    path = write_file(tmp_path, num_rows=40, shape=(1 << 12,))
    store = open_store(tmp_path, make_keys(40))
    assert read(store, make_keys(4)) is not None
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(CacheFault, match=rf"{path} was truncated"):
        read(store, make_keys(4))


def test_a_file_changed_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    store = open_store(tmp_path, make_keys(40))
    assert read(store, make_keys(4)) is not None
    overwrite(path, payload_of(path)[0], b"\1")
    with pytest.raises(CacheFault, match=rf"{path} was changed"):
        read(store, make_keys(4))


def test_a_file_truncated_while_it_is_being_made_is_noticed(tmp_path: Path) -> None:
    keys = make_keys(40)
    store = open_store(tmp_path, keys)
    fill(store, keys[:16], make_rows(40)[:16])
    assert read(store, keys[:16]) is not None
    os.truncate(next(tmp_path.glob("*.tmp")), 100)
    with pytest.raises(CacheFault, match="was truncated"):
        read(store, keys[:16])
    with pytest.raises(CacheFault):
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_huge_sparse_file_is_refused_without_the_memory_that_it_asks_for(tmp_path: Path) -> None:
    small = ActivationFile(write_file(tmp_path, num_rows=4, shape=(1 << 12,))).manifest
    huge = dataclasses.replace(small, capacity=1 << 24, rows=1 << 24)
    frame = make_frame(huge.datasets(), huge.attributes())
    path = tmp_path / "huge.h5"
    with path.open("wb") as file:
        for offset, content in frame.extents.items():
            file.seek(offset)
            file.write(content)
        file.seek(frame.regions["manifest"].offset)
        file.write(huge.to_json().ljust(frame.regions["manifest"].nbytes))
        file.truncate(frame.size)
    assert frame.size > 1 << 37

    def refused() -> Iterator[int]:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), size + (64 << 20)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CacheFault):
            ActivationFile(path).verify()
        yield resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    status, lines = run_in_child(refused)
    assert status == 0 and int(lines[0]) < 96 << 10


def test_a_refused_file_is_closed_once(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"")
    with (tmp_path / "short").open("rb") as short:
        with pytest.raises(CacheFault) as refused:
            MappedRows(short.fileno(), offset=0, num_rows=2, row_bytes=4, name="short", dtype=torch.float32)
        # The system gives the next file the lowest number that is free: that of the descriptor just closed.
        others = [os.open(tmp_path / "short", os.O_RDONLY) for _ in range(3)]
        del refused
        gc.collect()
        for other in others:
            os.close(other)


def test_rows_that_were_never_written_are_not_served(tmp_path: Path) -> None:
    keys, rows = make_keys(40), make_rows(40)
    store = open_store(tmp_path, keys)
    fill(store, keys[:16], rows[:16])
    store.close()
    file = ActivationFile(store.path)
    assert sorted(file.keys) == keys[:16].tolist() and file.manifest.capacity == 40
    assert read(open_store(tmp_path, keys), keys[16:32]) is None


def test_a_damaged_row_reaches_no_reader_of_a_store(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    start, row_bytes = payload_of(path)
    overwrite(path, start + 39 * row_bytes, b"\1")
    store = open_store(tmp_path, make_keys(40))
    with pytest.raises(CacheFault, match=rf"{path}.*damaged"):
        read(store, make_keys(2))


def test_a_deleted_file_stays_readable(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    store = open_store(tmp_path, make_keys(40))
    path.unlink()
    found = read(store, make_keys(16))
    assert found is not None and torch.equal(found, make_rows(40)[:16])
