"""A cache that fails while it is in use: given up, or the end of the run; and rows that are not believed."""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.reader import directory_bytes
from tests.single.cache.epochs import NUM_SAMPLES, OWNED_KEYS, begun, check_epoch, run_epoch
from tests.single.cache.material import FrozenNet, batches_of, make_fingerprint


def test_a_cache_that_is_cut_off_while_in_use_is_given_up_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path)
    run_epoch(cached, batches_of(NUM_SAMPLES))
    cached.publish()
    (path,) = tmp_path.glob("*.h5")
    os.truncate(path, 4096)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=1))
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=2))
    assert cached.failed is not None and str(path) in cached.failed
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    net.begin(cached, 3, OWNED_KEYS)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.close()
    assert [left.name for left in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("call", "number"), [("pread", errno.EIO), ("fstat", errno.ESTALE)])
def test_a_cache_that_its_disk_does_not_give_back_is_given_up_and_training_goes_on(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path)
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    cached.publish()
    (path,) = tmp_path.glob("*.h5")
    # From here on its rows are read again before they are used.
    path.chmod(0o400)
    real = getattr(os, call)

    def fail(descriptor: int, *rest: int) -> Any:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise OSError(number, os.strerror(number))
        return real(descriptor, *rest)

    monkeypatch.setattr(os, call, fail)
    check_epoch(cached, net, batches_of(NUM_SAMPLES, epoch=1))
    assert f"{path} " in (cached.failed or "") and os.strerror(number) in (cached.failed or "")
    cached.close()


def fill_with_other_rows(net: FrozenNet, directory: Path, *, change: float, **changes: Any) -> Path:
    """Publish rows of a net whose weights were changed, under the fingerprint of `net`; give the weights back."""
    fingerprint, weight = net.fingerprint(2, **changes), net.blocks[0][0][0].weight
    original = weight.detach().clone()
    other = net.cached(directory)
    with torch.no_grad():
        weight.mul_(1 + change)
        other.begin_cut(2, fingerprint=fingerprint, owned_keys=OWNED_KEYS)
        run_epoch(other, batches_of(NUM_SAMPLES))
        weight.copy_(original)
    other.close()
    (path,) = directory.glob("*.h5")
    return path


@pytest.mark.parametrize(
    ("change", "changes", "batch_invariant", "used"),
    [
        (1e-6, {}, True, False),
        (1e-6, {}, False, True),
        (1e-6, {"threads": 2}, True, True),
        (0.5, {}, False, False),
        (0.5, {"threads": 2}, True, False),
    ],
)
def test_rows_are_compared_with_computed_ones_before_the_first_is_used(
    change: float, changes: dict[str, Any], batch_invariant: bool, used: bool, tmp_path: Path
) -> None:
    net = FrozenNet()
    path = fill_with_other_rows(net, tmp_path, change=change, **changes)
    stopping = net.cached(tmp_path, on_failure="stop")
    begin = partial(
        stopping.begin_cut, 2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS, batch_invariant=batch_invariant
    )
    if used:
        begin()
        assert not stopping.missing(*OWNED_KEYS).any()
    else:
        with pytest.raises(
            CacheFault, match=rf"{path} refused: its fingerprint matches, but its rows differ.* or directory="
        ):
            begin()
    stopping.close()
    going_on = net.cached(tmp_path)
    going_on.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS, batch_invariant=batch_invariant)
    if not used:
        assert str(path) in (going_on.failed or "")
        check_epoch(going_on, net, batches_of(NUM_SAMPLES))
    assert (going_on.counters.rows_read == 0) or used
    going_on.close()
    assert path.exists(), "another run's file is left to its owner"


def test_every_file_that_comes_into_use_is_compared(tmp_path: Path) -> None:
    net = FrozenNet()
    for rank in range(3):
        one = net.cached(tmp_path, shard=f"{rank}of3")
        with torch.no_grad():
            net.blocks[0][0][0].weight.mul_(2.0 if rank == 2 else 1.0)
        one.begin_cut(2, fingerprint=make_fingerprint(), owned_keys=(OWNED_KEYS[0][rank::3], OWNED_KEYS[1][rank::3]))
        one.sweep(everything=True)
        with torch.no_grad():
            net.blocks[0][0][0].weight.div_(2.0 if rank == 2 else 1.0)
        one.close()
    whole = net.cached(tmp_path)
    whole.begin_cut(2, fingerprint=make_fingerprint(), owned_keys=OWNED_KEYS)
    assert "2of3" in (whole.failed or ""), whole.failed


@pytest.mark.parametrize("on_failure", ["recompute", "stop"])
def test_a_full_disk_means_what_was_asked_for(on_failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = FrozenNet()
    budget = Budget()
    cached = begun(net, tmp_path, on_failure=on_failure, budget=budget)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    if on_failure == "stop":
        with pytest.raises(CacheFault, match="No space left"):
            run_epoch(cached, batches_of(NUM_SAMPLES))
    else:
        check_epoch(cached, net, batches_of(NUM_SAMPLES))
        assert cached.failed is not None and "No space left" in cached.failed
    cached.close()
    assert list(tmp_path.iterdir()) == [] and budget.used_bytes == 0


def test_another_rank_can_have_the_cache_given_up(tmp_path: Path) -> None:
    net = FrozenNet()
    cached = begun(net, tmp_path)
    run_epoch(cached, batches_of(NUM_SAMPLES)[:2])
    cached.disable("rank 1: the disk is full")
    check_epoch(cached, net, batches_of(NUM_SAMPLES))
    assert cached.failed == "rank 1: the disk is full" and list(tmp_path.iterdir()) == []
    cached.close()


def test_an_old_file_makes_room_when_both_do_not_fit_the_budget(tmp_path: Path) -> None:
    net = FrozenNet()
    size = NUM_SAMPLES * 8 * 8 * 8 * 4
    budget = Budget(size * 3 // 2)
    cached = net.cached(tmp_path, budget=budget)
    for cut in (1, 2, 3):
        net.begin(cached, cut, OWNED_KEYS)
        check_epoch(cached, net, batches_of(NUM_SAMPLES))
        assert not cached.missing(*OWNED_KEYS).any()
        assert directory_bytes(tmp_path) <= budget.used_bytes <= size * 3 // 2
    assert cached.failed is None
    cached.close()


def test_a_damaged_file_ends_a_run_that_is_to_stop(tmp_path: Path) -> None:
    net = FrozenNet()
    first = begun(net, tmp_path)
    run_epoch(first, batches_of(NUM_SAMPLES))
    first.close()
    (path,) = tmp_path.glob("*.h5")
    content = bytearray(path.read_bytes())
    content[-500] ^= 1
    path.write_bytes(content)
    second = net.cached(tmp_path, on_failure="stop")
    with pytest.raises(CacheFault, match=str(path)) as stopped:
        net.begin(second, 2, OWNED_KEYS)
    assert stopped.value.exit_code == 3
    second.close()


def test_a_file_that_comes_into_use_when_another_is_begun_is_compared(tmp_path: Path) -> None:
    net = FrozenNet()
    late = begun(net, tmp_path)
    path = fill_with_other_rows(net, tmp_path, change=0.5)
    check_epoch(late, net, batches_of(NUM_SAMPLES))
    assert late.counters.rows_read == 0 and late.failed is None
    check_epoch(late, net, batches_of(NUM_SAMPLES, epoch=1))
    assert f"{path} refused: its fingerprint matches, but" in (late.failed or "")
    late.close()
