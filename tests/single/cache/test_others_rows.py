"""Rows of other ranks, other runs and other jobs: read, waited for, and hashed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvfreeze.cache.file.reader import ActivationFile
from hvfreeze.cache.index import RowIndex
from tests.single.cache.epochs import NUM_SAMPLES, OWNED_KEYS, check_epoch, run_epoch
from tests.single.cache.material import FrozenNet, batches_of, make_keys, open_store, write_file


def test_a_partly_filled_cache_is_used_by_the_next_run_for_what_it_holds(tmp_path: Path) -> None:
    net = FrozenNet()
    first = net.cached(tmp_path)
    first.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS)
    run_epoch(first, batches_of(NUM_SAMPLES)[:3])
    first.close()
    second = net.cached(tmp_path)
    second.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS)
    check_epoch(second, net, batches_of(NUM_SAMPLES))
    assert second.counters.forwards == 2 and second.counters.rows_read == 48
    second.close()
    third = net.cached(tmp_path)
    third.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS)
    assert not third.missing(*OWNED_KEYS).any()
    third.close()


def test_a_run_of_another_size_needs_no_forward(tmp_path: Path) -> None:
    net = FrozenNet()
    for rank in range(2):
        one = net.cached(tmp_path, shard=f"{rank}of2")
        one.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=(OWNED_KEYS[0][rank::2], OWNED_KEYS[1][rank::2]))
        one.sweep(everything=True)
        one.close()
    for rank in range(3):
        one = net.cached(tmp_path, shard=f"{rank}of3")
        ids = OWNED_KEYS[0][rank::3]
        one.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=(ids, np.zeros_like(ids)))
        check_epoch(one, net, [(ids[:16], np.zeros(16, np.int64))])
        assert one.counters.forwards == 0
        one.close()


def test_ranks_that_share_read_what_the_other_has_published(tmp_path: Path) -> None:
    net = FrozenNet()
    ranks = [net.cached(tmp_path, shard=f"{rank}of2", shared=True) for rank in range(2)]
    batches = batches_of(64)
    for rank, one in enumerate(ranks):
        ids = np.concatenate([ids for ids, _ in batches[rank::2]])
        one.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=(ids, np.zeros_like(ids)))
        run_epoch(one, batches[rank::2])
    for one in ranks:
        one.publish()
    for one in ranks:
        one.refresh()
        check_epoch(one, net, batches_of(64, epoch=3))
        assert one.counters.forwards == 2
        one.close()


def test_every_shared_file_is_hashed_once_by_all_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, size = FrozenNet(), 4
    for rank in range(size):
        one = net.cached(tmp_path, shard=f"{rank}of{size}", shared=True)
        one.begin_cut(
            2, fingerprint=net.fingerprint(2), owned_keys=(OWNED_KEYS[0][rank::size], OWNED_KEYS[1][rank::size])
        )
        one.sweep(everything=True)
        one.close()
    hashed: list[str] = []
    compare = ActivationFile._compare
    monkeypatch.setattr(ActivationFile, "_compare", lambda self: hashed.append(self.path.name) or compare(self))
    ranks = [net.cached(tmp_path, shard=f"{rank}of{size}", shared=True) for rank in range(size)]
    for rank, one in enumerate(ranks):
        one.begin_cut(
            2, fingerprint=net.fingerprint(2), owned_keys=(OWNED_KEYS[0][rank::size], OWNED_KEYS[1][rank::size])
        )
    verified = [one.verify_share(rank, size) for rank, one in enumerate(ranks)]
    assert [len(names) for names in verified] == [1] * size
    for one in ranks:
        one.accept({name: digest for names in verified for name, digest in names.items()})
        check_epoch(one, net, batches_of(NUM_SAMPLES))
    assert sorted(hashed) == sorted(path.name for path in tmp_path.glob("*.h5"))
    late = net.cached(tmp_path, shard="0of4", shared=True)
    late.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=(OWNED_KEYS[0][::4], OWNED_KEYS[1][::4]))
    late.accept({name: "another file's digest" for names in verified for name in names})
    check_epoch(late, net, batches_of(NUM_SAMPLES))
    assert len(hashed) == 2 * size, "what nobody has verified is verified by whoever reads it"
    for one in [*ranks, late]:
        one.close()


def test_the_index_of_shared_files_grows_once_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(6):
        write_file(tmp_path, num_rows=5, first=5 * rank, shard=f"{rank}of6")
    grown: list[int] = []
    extend = RowIndex.extend
    monkeypatch.setattr(RowIndex, "extend", lambda self, more: grown.append(len(more)) or extend(self, more))
    store = open_store(tmp_path, make_keys(1), shared=True)
    assert grown == [6] and not store.missing(make_keys(30)).any()


@pytest.mark.parametrize("sweep", [False, True])
def test_rows_that_another_job_is_building_are_computed_and_read_from_the_next_epoch_on(
    sweep: bool, tmp_path: Path
) -> None:
    net = FrozenNet()
    builder, other = net.cached(tmp_path, owner="builder"), net.cached(tmp_path, owner="other", on_failure="stop")
    for cached in (builder, other):
        cached.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS)
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


def test_a_file_of_an_earlier_run_is_a_hit_and_outlives_the_cut(tmp_path: Path) -> None:
    net = FrozenNet()
    earlier = net.cached(tmp_path, owner="earlier")
    earlier.begin_cut(1, fingerprint=net.fingerprint(1), owned_keys=OWNED_KEYS)
    earlier.sweep(everything=True)
    earlier.close()
    later = net.cached(tmp_path, owner="later")
    later.begin_cut(1, fingerprint=net.fingerprint(1), owned_keys=OWNED_KEYS)
    assert not later.missing(*OWNED_KEYS).any()
    later.begin_cut(2, fingerprint=net.fingerprint(2), owned_keys=OWNED_KEYS)
    check_epoch(later, net, batches_of(NUM_SAMPLES))
    later.close()
    assert len(list(tmp_path.glob("*.h5"))) == 2
