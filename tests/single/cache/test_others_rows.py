"""Rows of other ranks, other runs and other jobs: read, waited for, and hashed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvfreeze.cache.file.format import Keys
from hvfreeze.cache.file.reader import ActivationFile
from tests.single.cache.epochs import NUM_SAMPLES, OWNED_KEYS, begun, check_epoch, run_epoch
from tests.single.cache.material import FrozenNet, batches_of


def share(rank: int, size: int) -> tuple[Keys, Keys]:
    return OWNED_KEYS[0][rank::size], OWNED_KEYS[1][rank::size]


def test_a_partly_filled_cache_is_used_by_the_next_run_for_what_it_holds(tmp_path: Path) -> None:
    net = FrozenNet()
    first = begun(net, tmp_path)
    run_epoch(first, batches_of(NUM_SAMPLES)[:3])
    first.close()
    second = begun(net, tmp_path)
    check_epoch(second, net, batches_of(NUM_SAMPLES))
    assert second.counters.forwards == 2 and second.counters.rows_read == 48
    second.close()
    third = begun(net, tmp_path)
    assert not third.missing(*OWNED_KEYS).any()
    third.close()


def test_a_run_of_another_size_needs_no_forward(tmp_path: Path) -> None:
    net = FrozenNet()
    for rank in range(2):
        one = net.cached(tmp_path, shard=f"{rank}of2")
        net.begin(one, 2, share(rank, 2))
        one.sweep(everything=True)
        one.close()
    for rank in range(3):
        one = net.cached(tmp_path, shard=f"{rank}of3")
        ids, views = share(rank, 3)
        net.begin(one, 2, (ids, views))
        check_epoch(one, net, [(ids[:16], views[:16])])
        assert one.counters.forwards == 0 and one.exact
        one.close()


def test_every_shared_file_is_hashed_once_by_all_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, size = FrozenNet(), 4
    for rank in range(size):
        one = net.cached(tmp_path, shard=f"{rank}of{size}", shared=True)
        net.begin(one, 2, share(rank, size))
        one.sweep(everything=True)
        one.close()
    hashed: list[str] = []
    compare = ActivationFile._compare
    monkeypatch.setattr(ActivationFile, "_compare", lambda self: hashed.append(self.path.name) or compare(self))
    ranks = [net.cached(tmp_path, shard=f"{rank}of{size}", shared=True) for rank in range(size)]
    for rank, one in enumerate(ranks):
        net.begin(one, 2, share(rank, size))
    verified = [one.verify_share(rank, size) for rank, one in enumerate(ranks)]
    assert [len(names) for names in verified] == [1] * size
    for one in ranks:
        one.accept({name: digest for names in verified for name, digest in names.items()})
        check_epoch(one, net, batches_of(NUM_SAMPLES))
    assert sorted(hashed) == sorted(path.name for path in tmp_path.glob("*.h5"))
    late = net.cached(tmp_path, shard="0of4", shared=True)
    net.begin(late, 2, share(0, 4))
    late.accept({name: "another file's digest" for names in verified for name in names})
    check_epoch(late, net, batches_of(NUM_SAMPLES))
    assert len(hashed) == 2 * size, "what nobody has verified is verified by whoever reads it"
    for one in [*ranks, late]:
        one.close()


@pytest.mark.parametrize("sweep", [False, True])
def test_rows_that_another_job_is_building_are_computed_and_read_from_the_next_epoch_on(
    sweep: bool, tmp_path: Path
) -> None:
    net = FrozenNet()
    builder, other = net.cached(tmp_path, owner="builder"), net.cached(tmp_path, owner="other", on_failure="stop")
    for cached in (builder, other):
        net.begin(cached, 2, OWNED_KEYS)
    first, *rest = batches_of(NUM_SAMPLES)
    builder.get(*first)
    if sweep:
        assert other.sweep(everything=True) == 0 and other.counters.forwards == 1
    check_epoch(other, net, batches_of(NUM_SAMPLES), sweep=sweep)
    assert other.counters.rows_written == 0
    run_epoch(builder, rest)
    builder.publish()
    forwards = other.counters.forwards
    check_epoch(other, net, batches_of(NUM_SAMPLES, epoch=1), sweep=sweep)
    assert other.counters.forwards == forwards and other.counters.rows_read == NUM_SAMPLES
    other.close()
    builder.close()
