"""Pixels in memory that the ranks of a node share; each rank reads or decodes a part."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.node_memory import Node, node_of, protect, share_memory
from hvfreeze.comm.world import World
from hvfreeze.config.data import DataConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus
from hvfreeze.data.cifar import ARCHIVES, IMAGE_SHAPE, Contents, read_classes, read_images
from hvfreeze.data.data_sets import ImageSet, root_of
from hvfreeze.data.decoding import Pool, open_pool
from hvfreeze.data.folders import is_folder
from hvfreeze.data.reading import PixelArray
from hvfreeze.data.shards import Ids
from hvfreeze.data.text import TextSource
from hvfreeze.strategies.opening import reads_images


def notes_on_sharing(refusal: str) -> list[str]:
    """Return a note if ranks of a node cannot share memory."""
    return [f"ranks of a node cannot share memory ({refusal}): each keeps a copy of the images"] if refusal else []


def read_archive_once(data: DataConfig, world: World) -> tuple[Contents | None, str]:
    """Return the contents of CIFAR's archive, and why a node cannot share memory. Collective.

    One rank per node reads each file into read-only memory that all ranks of the node share. None if there is no
    archive, no node has several ranks, or this node cannot share memory; then each rank must read it.

    Raises:
        RefusedError: a file is missing, damaged or asks to run code; on all ranks.
    """
    archive, root = ARCHIVES.get(data.data), root_of(data.data, data.data_dir)
    if archive is None:
        return None, ""
    node = node_of(world, reads=str(root.resolve()))
    if not node.shared:
        return None, ""
    files = (*archive.train, *archive.test)

    def read() -> tuple[tuple[str, ...], dict[str, tuple[PixelArray, list[int]]]] | None:
        if not is_folder(root / archive.folder):
            return None
        classes = read_classes(root, archive)
        return classes, {name: read_images(root, archive, name) for name in files[node.place :: len(node.ranks)]}

    mine = raise_on_all_ranks(world, read, name="archive")
    known = mine and {name: np.array(labels, dtype=np.int16) for name, (_, labels) in mine[1].items()}
    everyone = world.allgather_object(known, name="archive.labels")
    here = [everyone[rank] for rank in node.ranks]
    labels = {name: each[name] for each in here if each for name in each}
    whole = None not in here and len(labels) == len(files)
    ends = np.cumsum([len(labels[name]) for name in files]) if whole else np.zeros(1, np.int64)
    memory, refusal = share_memory(world, node, int(ends[-1] * np.prod(IMAGE_SHAPE)), name="archive")
    if memory is not None and mine is not None:
        pixels = memory.reshape(-1, *IMAGE_SHAPE)
        for name, end in zip(files, ends):
            if name in mine[1]:
                pixels[end - len(labels[name]) : end] = mine[1][name][0]
    # Ranks of nodes without sharing come here too.
    world.barrier(name="archive.read")
    if memory is None or mine is None:
        return None, refusal
    protect(memory)
    trained = int(ends[len(archive.train) - 1])
    train, test = ([n for name in names for n in labels[name].tolist()] for names in (archive.train, archive.test))
    return Contents(mine[0], (pixels[:trained], train), (pixels[trained:], test)), refusal


def share_pools(
    config: Config, world: World, corpus: Corpus, *, budget_bytes: int
) -> tuple[tuple[Pool | None, Pool | None], str]:
    """Return memory for the training and the evaluation samples, shared by the ranks of a node. Collective.

    `budget_bytes` is the budget of each rank for the pixels of a split. See `share_pool`.
    """
    replicas = corpus.plan.replicas
    if isinstance(corpus.train.source, TextSource) or (replicas == world.size and not corpus.plan.mixes):
        return (None, None), ""
    node = node_of(world, reads=str(root_of(config.data.data, config.data.data_dir).resolve()))
    nothing = np.zeros(0, np.int64)

    def wanted(samples: Callable[[int], Ids]) -> Callable[[int], Ids]:
        of = world.size // replicas
        return lambda rank: samples(rank // of) if reads_images(world, config.strategy, rank) else nothing

    budget_bytes *= len(node.ranks)
    shards = wanted(corpus.plan.shards.__getitem__)
    shares = wanted(corpus.share)
    train, refusal = share_pool(world, node, corpus.train, shards, budget_bytes=budget_bytes, name="train")
    test, other = share_pool(world, node, corpus.evaluated, shares, budget_bytes=budget_bytes, name="test")
    return (train, test), refusal or other


def share_pool(
    world: World,
    node: Node,
    image_set: ImageSet,
    wanted: Callable[[int], Ids],
    *,
    budget_bytes: int,
    name: str,
) -> tuple[Pool | None, str]:
    """Return memory for pixels that the ranks of a node share, and why a node cannot share memory. Collective.

    Args:
        world: all ranks.
        node: this rank's node.
        image_set: the split.
        wanted: the samples of each rank.
        budget_bytes: budget of the node for the pixels of the split.
        name: name of the collectives, the same on all ranks.

    Returns:
        A pool with the samples of all ranks of the node; each rank decodes a part. None if no sample is used by two
        ranks, the samples are in memory already or exceed the budget, or the node has one rank or cannot share memory.
    """
    chosen, times = np.zeros(len(image_set), dtype=np.bool_), 0
    for rank in node.ranks:
        ids = wanted(rank)
        chosen[ids] = True
        times += len(ids)
    ids = np.flatnonzero(chosen)
    shape = (len(ids), *image_set.image_shape)
    needed = int(np.prod(shape))
    asked = times > len(ids) and needed <= budget_bytes and open_pool(image_set) is None
    memory, refusal = share_memory(world, node, needed if asked else 0, name=f"pixels.{name}")
    if memory is None:
        return None, refusal
    ends = [len(ids) * place // len(node.ranks) for place in (node.place, node.place + 1)]
    return Pool(ids, memory.reshape(shape), slice(*ends)), refusal
