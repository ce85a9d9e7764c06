"""Memory for large batches is used again, and never while somebody can see it."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ALIGNMENT, MOST_KEPT, MappedRows, Room


def test_memory_is_used_again_only_after_every_view_of_it_is_gone() -> None:
    room = Room()
    tensor = torch.from_numpy(room.take(4096))
    place, part = tensor.data_ptr(), tensor.view(torch.float32).view(32, 32)[3:5]
    del tensor
    assert torch.from_numpy(room.take(4096)).data_ptr() != place, "a view still shows it"
    del part
    assert torch.from_numpy(room.take(4096)).data_ptr() == place


def test_memory_is_held_by_a_graph_too() -> None:
    room = Room()
    tensor = torch.from_numpy(room.take(4096)).view(torch.float32)
    place = tensor.data_ptr()
    product = (torch.ones(1024, requires_grad=True) * tensor).sum()
    del tensor
    assert torch.from_numpy(room.take(4096)).data_ptr() != place, "backward will read it"
    product.backward()  # type: ignore[no-untyped-call]
    del product
    assert torch.from_numpy(room.take(4096)).data_ptr() == place


def test_memory_is_aligned_and_little_of_it_is_kept() -> None:
    room = Room()
    taken = [room.take(1000 + ALIGNMENT) for _ in range(MOST_KEPT + 3)]
    assert len({array.ctypes.data for array in taken}) == len(taken)
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in taken)
    del taken
    assert len(room._free) == MOST_KEPT
    other: np.ndarray = room.take(50)
    assert len(room._free) == 0, "batches of another size are not coming back"
    assert other.nbytes == 50


def test_memory_goes_on_being_used_while_it_dies_in_another_thread() -> None:
    room = Room()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(200):
            tensor = torch.from_numpy(room.take(4096)).fill_(7)
            dying = threads.submit(lambda held: held.sum().item(), [tensor].pop())
            del tensor
            fresh = torch.from_numpy(room.take(4096)).fill_(1)
            assert dying.result() == 7 * 4096
            assert fresh.sum() == 4096


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
