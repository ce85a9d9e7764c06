"""Pixels that ranks of a node share: there once, read-only, the same as read alone; and what happens where not."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hvfreeze.comm import node_memory
from hvfreeze.comm.world import World
from hvfreeze.config.data import DataConfig
from hvfreeze.config.strategy import ReplicasConfig, StrategyConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus, TrainFeed
from hvfreeze.data.cifar import ARCHIVES, read_archive
from hvfreeze.data.data_sets import ImageSet, open_data
from hvfreeze.data.decoding import Images, Inputs, MemoryPixels
from hvfreeze.errors import RefusedError
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.samples import node_pixels
from hvfreeze.samples import opening as samples
from hvfreeze.strategies.opening import replicas_of
from hvfreeze.strategies.shared_trunk.settings import SharedTrunkConfig
from tests.program import save_photos
from tests.single.data.test_cifar import write_cifar10

ARCHIVE = ARCHIVES["cifar10"]


def mappings() -> list[tuple[str, str]]:
    """The permissions and the inode of each piece of shared memory that this rank sees; none has a name to be left.

    Sorted by inode: at which address a rank maps which piece differs from rank to rank.
    """
    gc.collect()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:hvfreeze-" in line]
    assert all(words[-1] == "(deleted)" for words in lines)
    return sorted(((words[1], words[4]) for words in lines), key=lambda mapping: int(mapping[1]))


def release() -> None:
    assert mappings() == []
    descriptors = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert not [place for place in descriptors if os.path.lexists(place) and "memfd" in os.readlink(place)]


@contextmanager
def folder_of(world: World) -> Iterator[Path]:
    """A folder that all ranks see; no rank may hold shared memory of a check before."""
    release()
    folder = Path(world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "", name="test.folder"))
    yield folder
    world.barrier(name="test.seen")
    if world.rank == 0:
        shutil.rmtree(folder)


@contextmanager
def archive(world: World) -> Iterator[DataConfig]:
    with folder_of(world) as folder:
        if world.rank == 0:
            write_cifar10(folder)
        world.barrier(name="test.written")
        yield DataConfig(data="cifar10", data_dir=str(folder))


@contextmanager
def photos(world: World, **settings: Any) -> Iterator[DataConfig]:
    with folder_of(world) as folder:
        if world.rank == 0:
            save_photos(folder, training=6 * world.size)
        world.barrier(name="test.written")
        yield DataConfig(data="imagefolder", data_dir=str(folder), **settings)


def opened(world: World, config: Config) -> Corpus:
    small = replace(config, optimizer=replace(config.optimizer, batch_size=2))
    replicas = replicas_of(world, config.strategy)
    return samples.open_corpus(small, world, replicas=replicas, clock=PhaseClock(SET_UP_PHASES))


def loaded(world: World, config: Config, corpus: Corpus) -> tuple[TrainFeed, Inputs, list[str]]:
    replica = world.rank * corpus.plan.replicas // world.size
    feed, evaluated, _, notes = samples.load_share(
        config, world, corpus, replica=replica, rows=config.optimizer.batch_size
    )
    return feed, evaluated, notes


def same_on_all(world: World, value: object) -> bool:
    return len(set(world.allgather_object(repr(value), name="test.same"))) == 1


def total(world: World, number: int) -> int:
    return sum(world.allgather_object(number, name="test.total"))


def check_an_archive_is_read_once_and_shared_read_only(world: World) -> None:
    with archive(world) as data:
        with patch.object(node_pixels, "read_images", wraps=node_pixels.read_images) as read:
            corpus = opened(world, Config(data=data))
        assert total(world, read.call_count) == 6, "each file by one rank"
        assert [access for access, _ in mappings()] == ["r--s"] and same_on_all(world, mappings())
        alone = open_data("cifar10", data.data_dir)
        for mine, theirs in ((corpus.train, alone.train), (corpus.evaluated, alone.test)):
            assert mine.identity() == theirs.identity() and mine.classes == theirs.classes
            assert torch.equal(mine.labels, theirs.labels)
        feed, evaluated, notes = loaded(world, Config(data=data), corpus)
        own = feed.plan.shards[world.rank]
        expected = np.stack([alone.train.decode(row) for row in own])
        assert (fetched(feed.images, own) == expected).all()
        assert isinstance(evaluated, Images) and notes == [] and len(mappings()) == 1, "pixels are not copied"


def fetched(inputs: Inputs, ids: np.ndarray) -> np.ndarray:
    assert isinstance(inputs, Images) and isinstance(inputs.pixels, MemoryPixels)
    return inputs.pixels.fetch(ids).numpy()


def check_images_that_all_ranks_read_are_decoded_once(world: World) -> None:
    decode_once(world, "global", ReplicasConfig())


def check_images_that_the_ranks_of_a_replica_read_are_decoded_once(world: World) -> None:
    decode_once(world, "shard", SharedTrunkConfig(trunk="whole"))


def decode_once(world: World, shuffle: str, strategy: StrategyConfig) -> None:
    with photos(world, shuffle=shuffle) as data:
        config, decoded = Config(data=data, strategy=strategy), list[int]()
        corpus, decode = opened(world, config), ImageSet.decode

        def count(self: ImageSet, row: int) -> Any:
            decoded.append(row)
            return decode(self, row)

        with patch.object(ImageSet, "decode", count):
            feed, evaluated, notes = loaded(world, config, corpus)
        assert total(world, len(decoded)) == len(corpus.train) + len(corpus.evaluated) and notes == []
        pieces = 1 if shuffle == "global" else 2
        assert [access for access, _ in mappings()] == ["r--s"] * pieces and same_on_all(world, mappings())
        tested = corpus.share(world.rank * corpus.plan.replicas // world.size)
        for inputs, image_set, ids in (
            (feed.images, corpus.train, corpus.train.ids),
            (evaluated, corpus.evaluated, tested),
        ):
            assert (fetched(inputs, ids) == np.stack([image_set.decode(row) for row in ids])).all()


def check_ranks_with_images_of_their_own_share_nothing(world: World) -> None:
    with photos(world) as data:
        corpus = opened(world, Config(data=data))
        feed, _, notes = loaded(world, Config(data=data), corpus)
        assert mappings() == [] and notes == [] and len(fetched(feed.images, feed.plan.shards[world.rank])) > 0


def check_machines_share_nothing_with_each_other(world: World) -> None:
    name = f"machine{world.rank % 2}"
    with archive(world) as data, patch.object(node_memory.socket, "gethostname", lambda: name):
        corpus = opened(world, Config(data=data))
        several = len(range(world.rank % 2, world.size, 2)) > 1
        seen = world.allgather_object((name, mappings()), name="test.mappings")
        assert len(mappings()) == several
        assert all((theirs == mappings()) == (host == name or not (theirs or several)) for host, theirs in seen)
        assert corpus.train.identity() == open_data("cifar10", data.data_dir).train.identity()


def check_ranks_that_read_from_different_places_share_nothing(world: World) -> None:
    with folder_of(world) as folder:
        if world.rank == 0:
            for name in "01":
                write_cifar10(folder / name)
            other = folder / "1" / ARCHIVE.folder
            shutil.copy(other / "data_batch_3", other / "data_batch_2")
        world.barrier(name="test.written")
        root = folder / str(world.rank % 2)
        corpus = opened(world, Config(data=DataConfig(data="cifar10", data_dir=str(root))))
        expected, _ = read_archive(root, ARCHIVE).train
        assert (np.stack([corpus.train.decode(row) for row in range(20)]) == expected).all()


def check_where_memory_is_refused_each_rank_keeps_its_own(world: World) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOSYS, "it is refused")

    last = world.rank == world.size - 1
    for function, here in (("memfd_create", True), ("readlink", last), ("ftruncate", True)):
        with archive(world) as data:
            found = read_archive(Path(str(data.data_dir)), ARCHIVE)
            with patch.object(node_memory.os, function, refused if here else getattr(os, function)):
                corpus = opened(world, Config(data=data))
            assert mappings() == []
            told = [note for note in corpus.notes if "cannot share memory" in note and "it is refused" in note]
            assert len(told) == 1
            assert corpus.train.decode(7).tolist() == found.train[0][7].tolist()
        with photos(world, shuffle="global") as data:
            corpus = opened(world, Config(data=data))
            with patch.object(node_memory.os, function, refused if here else getattr(os, function)):
                feed, _, notes = loaded(world, Config(data=data), corpus)
            assert len(notes) == 1 and "it is refused" in notes[0] and same_on_all(world, notes)
            assert len(fetched(feed.images, corpus.train.ids)) == len(corpus.train) and mappings() == []


def check_a_rank_that_finds_another_process_there_is_not_given_its_memory(world: World) -> None:
    node = node_memory.node_of(world)
    other = patch.object(node_memory.os, "readlink", lambda place: "/memfd:another (deleted)")
    with other:
        memory, why = node_memory.share_memory(world, node, 100, name="test.other")
    assert memory is None and "cannot see each other's processes" in why


def check_pixels_that_do_not_fit_are_streamed(world: World) -> None:
    with photos(world, shuffle="global") as data, patch.object(samples, "memory_budget", lambda local_size: 0):
        corpus = opened(world, Config(data=data))
        feed, _, notes = loaded(world, Config(data=data), corpus)
        assert isinstance(feed.images, Images) and not isinstance(feed.images.pixels, MemoryPixels)
        assert mappings() == [] and notes == []


def check_damaged_files_are_named_once_on_all_ranks(world: World) -> None:
    with archive(world) as data:
        if world.rank == 0:
            (Path(str(data.data_dir)) / ARCHIVE.folder / "data_batch_2").write_bytes(b"damaged")
        world.barrier(name="test.damaged")
        told = refusal(lambda: opened(world, Config(data=data)))
        assert "data_batch_2 is not an intact CIFAR file" in told and same_on_all(world, told)
    with photos(world, shuffle="global") as data:
        corpus = opened(world, Config(data=data))
        names = (corpus.train.called(1), corpus.train.called(len(corpus.train) - 1))
        if world.rank == 0:
            for name in names:
                Path(name).write_bytes(Path(name).read_bytes()[:-60])
        world.barrier(name="test.damaged")
        told = refusal(lambda: loaded(world, Config(data=data), corpus))
        assert "2 images cannot be used" in told and same_on_all(world, told)
        assert all(told.count(name) == 1 for name in names), told


def refusal(work: Any) -> str:
    try:
        work()
    except RefusedError as error:
        return str(error)
    raise AssertionError("nobody refused")


def check_nothing_is_held_in_the_end(world: World) -> None:
    release()
    gc.unfreeze()


def setting(world: World, root: Path) -> World:
    """Exclude existing objects from garbage collection: with them a collection takes a third of a second."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    return world
