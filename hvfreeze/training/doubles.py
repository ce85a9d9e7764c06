"""Images that are in both splits, or in two classes, looked for by all ranks together; see `data/overlap.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hvfreeze.comm.world import World
from hvfreeze.data.batches import Corpus, TrainFeed
from hvfreeze.data.decoding import Images, Inputs, MemoryPixels
from hvfreeze.data.images import FileSource
from hvfreeze.data.overlap import (
    MOST_TRAINED_DECODED,
    MOST_TWIN_BYTES,
    Conflict,
    Digests,
    Doubles,
    Overlap,
    digests_in_memory,
    digests_of_decoded,
    digests_of_files,
    doubles_by_origin,
    files_of_equal_size,
    files_to_compare,
    first_pixels,
    keys_of,
    looked_at,
    match,
    samples_to_decode,
    twins_in,
)
from hvfreeze.data.own import DatasetSource
from hvfreeze.data.shards import Ids, evenly
from hvfreeze.data.text import TextSource

T = TypeVar("T")


def overlap_of(world: World, corpus: Corpus, feed: TrainFeed, evaluated: Inputs) -> Overlap | None:
    """Return which evaluated images are training images too, None where none is known to be. Collective.

    Images of all ranks are compared where they are in memory, else a few of their files, or of them once decoded.
    """
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    held, shown = (x.pixels if isinstance(x, Images) else None for x in (feed.images, evaluated))
    here = None
    if isinstance(held, MemoryPixels) and isinstance(shown, MemoryPixels):
        here = (shown, looked_at(shown, corpus.share(replica))), (held, corpus.plan.owned(replica))
    # One rank of those that work on the same samples.
    leads = place == 0
    counts = world.allgather_object((leads, None if here is None else len(here[0][1])), name="overlap")
    known = [count for leading, count in counts if leading and count is not None]
    if len(known) == sum(leading for leading, _ in counts):
        doubles, looked = doubles_in_memory(world, here if leads else None), sum(known)
    elif isinstance(corpus.evaluated.source, TextSource):
        return None
    else:
        doubles, looked = doubles_of_streamed(world, corpus)
    if not doubles:
        return None
    first = min(doubles)
    return Overlap(
        found=len(doubles),
        looked_at=looked,
        evaluated=len(corpus.evaluated_ids),
        example=(corpus.evaluated.called(first), corpus.train.called(doubles[first])),
    )


def conflict_of(world: World, corpus: Corpus, feed: TrainFeed) -> Conflict | None:
    """Return which training images are the same picture in different classes, None where none is known. Collective.

    Images of all ranks are compared where they are in memory, else a few of their files, or of them once decoded.
    """
    if isinstance(corpus.train.source, TextSource):
        return None
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    held = feed.images.pixels if isinstance(feed.images, Images) else None
    known = world.allgather_object(place > 0 or isinstance(held, MemoryPixels), name="twins")
    trained = np.unique(np.concatenate(corpus.plan.shards))
    if all(known):
        in_memory = held if place == 0 and isinstance(held, MemoryPixels) else None
        mine, left_out = digests_of_twins(world, in_memory, corpus.plan.owned(replica))
        looked = len(trained) - left_out
    else:
        mine, looked = digests_of_streamed(world, corpus, trained)
    digests = merged(world.allgather_object(mine, name="twins.digests"))
    labels = corpus.train.labels.tolist()
    twins = twins_in(digests, labels)
    if not twins:
        return None
    first = twins[0]
    other = next(each for each in twins if digests[each] == digests[first] and labels[each] != labels[first])
    return Conflict(
        found=len(twins),
        looked_at=looked,
        trained=len(trained),
        example=(corpus.train.called(first), corpus.train.called(other)),
        classes=(corpus.train.classes[labels[first]], corpus.train.classes[labels[other]]),
    )


def digests_of_twins(world: World, pixels: MemoryPixels | None, ids: Ids) -> tuple[Digests, int]:
    """Return digests of this rank's training images whose first pixels another image of any rank has. Collective.

    And how many of all ranks are left out, because they are too many. `pixels` is None where another rank has them.
    """
    first = np.zeros(0, np.uint64) if pixels is None else keys_of(first_pixels(pixels, ids))
    everyone = world.allgather_object((first, 0 if pixels is None else pixels.bytes_each), name="twins.first")
    keys, counts = np.unique(np.concatenate([each for each, _ in everyone]), return_counts=True)
    keys, counts = keys[counts > 1], counts[counts > 1]
    taken = np.cumsum(counts) * max(each for _, each in everyone) <= MOST_TWIN_BYTES
    digests = {} if pixels is None else digests_in_memory(pixels, ids[np.isin(first, keys[taken])])
    return digests, int(counts[~taken].sum())


def digests_of_streamed(world: World, corpus: Corpus, trained: Ids) -> tuple[Digests, int]:
    """Return digests of a share of a few training images that are not in memory, and of how many there are some."""
    source = corpus.train.source
    if isinstance(source, FileSource):
        chosen = files_of_equal_size(source, trained)
        return digests_of_files(source, chosen[world.rank :: world.size]), len(chosen)
    chosen = evenly(trained, MOST_TRAINED_DECODED)
    return digests_of_decoded(corpus.train, chosen[world.rank :: world.size]), len(chosen)


def doubles_in_memory(world: World, here: tuple[tuple[MemoryPixels, Ids], tuple[MemoryPixels, Ids]] | None) -> Doubles:
    """Return which evaluated images of any rank are among the training images of any. Collective.

    `here` are this rank's evaluated and training images, None where other ranks have them all.
    """
    nothing = np.zeros(0, "S1")
    tested, trained = (first_pixels(*each) for each in here) if here else (nothing, nothing)
    seen = np.concatenate(world.allgather_object(tested, name="overlap.first"))
    alike = np.concatenate(world.allgather_object(np.intersect1d(trained, seen), name="overlap.alike"))
    if len(alike) == 0:
        return {}

    def digests_of(pixels: MemoryPixels, ids: Ids, first: NDArray[np.bytes_]) -> Digests:
        return digests_in_memory(pixels, ids[np.isin(first, alike)])

    mine = digests_of(*here[0], tested) if here else {}
    digests = merged(world.allgather_object(mine, name="overlap.digests"))
    found = match(digests, digests_of(*here[1], trained)) if here else {}
    return merged(world.allgather_object(found, name="overlap.doubles"))


def doubles_of_streamed(world: World, corpus: Corpus) -> tuple[Doubles, int]:
    """Return which evaluated images are among the training images, and how many were looked at. Collective.

    For images that are not in memory: by their files, by where they come from, or by a few that are decoded.
    """
    trained, tested = corpus.train.source, corpus.evaluated.source
    ids, trained_ids = corpus.evaluated_ids, np.unique(np.concatenate(corpus.plan.shards))
    if isinstance(trained, FileSource) and isinstance(tested, FileSource):
        chosen, candidates = files_to_compare(tested, ids, trained, trained_ids)
        return compare(world, digests_of_files, (tested, chosen), (trained, candidates), name="overlap.files")
    if isinstance(trained, DatasetSource) and isinstance(tested, DatasetSource):
        doubles = doubles_by_origin(tested, ids, trained, trained_ids)
        if doubles:
            return doubles, len(ids)
    chosen, candidates = samples_to_decode(ids, trained_ids)
    parts = (corpus.evaluated, chosen), (corpus.train, candidates)
    return compare(world, digests_of_decoded, *parts, name="overlap.decoded")


def compare(
    world: World,
    digests_of: Callable[[T, Ids], Digests],
    evaluated: tuple[T, Ids],
    trained: tuple[T, Ids],
    *,
    name: str,
) -> tuple[Doubles, int]:
    """Return the doubles by digests, of which each rank makes a share, and how many were looked at. Collective."""
    mine = [digests_of(images, ids[world.rank :: world.size]) for images, ids in (evaluated, trained)]
    everyone = world.allgather_object(mine, name=name)
    return match(*map(merged, zip(*everyone))), len(evaluated[1])


def merged(parts: Iterable[dict[int, T]]) -> dict[int, T]:
    """Return what all ranks have found, by sample."""
    return {sample: found for part in parts for sample, found in part.items()}
