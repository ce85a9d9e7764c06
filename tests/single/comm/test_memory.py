from __future__ import annotations

import platform

import pytest
import torch

from hvfreeze.comm.resources import end_set_up, peak_memory_bytes

MIB = 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for what it keeps")
def test_what_set_up_has_freed_is_neither_held_nor_counted_any_more() -> None:
    # Pieces that come from the heap, and one in fifty that stays: so the heap cannot shrink by itself.
    pieces = [torch.ones(16 * 1024) for _ in range(4000)]
    held = pieces[::50]
    before = peak_memory_bytes()
    del pieces
    end_set_up()
    after = peak_memory_bytes()
    assert before - after > 150 * MIB, (before / MIB, after / MIB)
    assert all(float(piece.sum()) == 16 * 1024 for piece in held)


def test_the_peak_is_the_most_since_then() -> None:
    end_set_up()
    before = peak_memory_bytes()
    assert before > 10 * MIB
    float(torch.ones(16 * MIB).sum())
    assert 60 * MIB < peak_memory_bytes() - before < 80 * MIB, "64 MiB were there, and are not any more"
    end_set_up()
    assert peak_memory_bytes() < before + 8 * MIB
