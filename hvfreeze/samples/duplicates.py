"""Find train/test duplicates and equal images with different labels, on all ranks together; see `data/overlap.py`."""

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
    MOST_HASHED_BYTES,
    MOST_TRAINED_DECODED,
    Conflict,
    Digests,
    Duplicates,
    Overlap,
    conflicts_in,
    digests_in_memory,
    digests_of_decoded,
    digests_of_files,
    duplicates_by_origin,
    files_of_equal_size,
    files_to_compare,
    first_pixels,
    images_to_compare,
    keys_of,
    match,
    samples_to_decode,
)
from hvfreeze.data.own import DatasetSource
from hvfreeze.data.shards import Ids, evenly
from hvfreeze.data.text import TextSource

T = TypeVar("T")


def overlap_of(world: World, corpus: Corpus, feed: TrainFeed, evaluated: Inputs) -> Overlap | None:
    """Return the train/test duplicates; None if none are found. Collective.

    Compares all ranks' images in memory; else a few files, or a few decoded images.
    """
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    held, shown = (x.pixels if isinstance(x, Images) else None for x in (feed.images, evaluated))
    here = None
    if isinstance(held, MemoryPixels) and isinstance(shown, MemoryPixels):
        here = (shown, images_to_compare(shown, corpus.share(replica))), (held, corpus.plan.owned(replica))
    # The first rank of each replica.
    leads = place == 0
    counts = world.allgather_object((leads, None if here is None else len(here[0][1])), name="overlap")
    known = [count for leading, count in counts if leading and count is not None]
    if len(known) == sum(leading for leading, _ in counts):
        duplicates, compared = duplicates_in_memory(world, here if leads else None), sum(known)
    elif isinstance(corpus.evaluated.source, TextSource):
        return None
    else:
        duplicates, compared = duplicates_of_streamed(world, corpus)
    if not duplicates:
        return None
    first = min(duplicates)
    return Overlap(
        found=len(duplicates),
        compared=compared,
        evaluated=len(corpus.evaluated_ids),
        example=(corpus.evaluated.called(first), corpus.train.called(duplicates[first])),
    )


def conflict_of(world: World, corpus: Corpus, feed: TrainFeed) -> Conflict | None:
    """Return equal training images with different classes; None if none are found. Collective.

    Compares all ranks' images in memory; else a few files, or a few decoded images.
    """
    if isinstance(corpus.train.source, TextSource):
        return None
    replica, place = divmod(world.rank, world.size // corpus.plan.replicas)
    held = feed.images.pixels if isinstance(feed.images, Images) else None
    known = world.allgather_object(place > 0 or isinstance(held, MemoryPixels), name="conflicts")
    trained = np.unique(np.concatenate(corpus.plan.shards))
    if all(known):
        in_memory = held if place == 0 and isinstance(held, MemoryPixels) else None
        mine, left_out = digests_of_candidates(world, in_memory, corpus.plan.owned(replica))
        compared = len(trained) - left_out
    else:
        mine, compared = digests_of_streamed(world, corpus, trained)
    digests = merged(world.allgather_object(mine, name="conflicts.digests"))
    labels = corpus.train.labels.tolist()
    conflicts = conflicts_in(digests, labels)
    if not conflicts:
        return None
    first = conflicts[0]
    other = next(each for each in conflicts if digests[each] == digests[first] and labels[each] != labels[first])
    return Conflict(
        found=len(conflicts),
        compared=compared,
        trained=len(trained),
        example=(corpus.train.called(first), corpus.train.called(other)),
        classes=(corpus.train.classes[labels[first]], corpus.train.classes[labels[other]]),
    )


def digests_of_candidates(world: World, pixels: MemoryPixels | None, ids: Ids) -> tuple[Digests, int]:
    """Return digests of this rank's training images whose first pixels equal another image's. Collective.

    Also returns how many candidates of all ranks exceed `MOST_HASHED_BYTES` and are not hashed. `pixels` is None if
    another rank holds them.
    """
    first = np.zeros(0, np.uint64) if pixels is None else keys_of(first_pixels(pixels, ids))
    everyone = world.allgather_object((first, 0 if pixels is None else pixels.bytes_each), name="conflicts.first")
    keys, counts = np.unique(np.concatenate([each for each, _ in everyone]), return_counts=True)
    keys, counts = keys[counts > 1], counts[counts > 1]
    taken = np.cumsum(counts) * max(each for _, each in everyone) <= MOST_HASHED_BYTES
    digests = {} if pixels is None else digests_in_memory(pixels, ids[np.isin(first, keys[taken])])
    return digests, int(counts[~taken].sum())


def digests_of_streamed(world: World, corpus: Corpus, trained: Ids) -> tuple[Digests, int]:
    """Return digests of this rank's share of a few streamed training images, and their number on all ranks."""
    source = corpus.train.source
    if isinstance(source, FileSource):
        chosen = files_of_equal_size(source, trained)
        return digests_of_files(source, chosen[world.rank :: world.size]), len(chosen)
    chosen = evenly(trained, MOST_TRAINED_DECODED)
    return digests_of_decoded(corpus.train, chosen[world.rank :: world.size]), len(chosen)


def duplicates_in_memory(
    world: World, here: tuple[tuple[MemoryPixels, Ids], tuple[MemoryPixels, Ids]] | None
) -> Duplicates:
    """Return the train/test duplicates of all ranks' images in memory. Collective.

    `here` are this rank's evaluated and training images; None if other ranks hold them.
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
    return merged(world.allgather_object(found, name="overlap.duplicates"))


def duplicates_of_streamed(world: World, corpus: Corpus) -> tuple[Duplicates, int]:
    """Return the train/test duplicates among streamed images, and the number of images compared. Collective.

    Compares files, origins, or a few decoded images.
    """
    trained, tested = corpus.train.source, corpus.evaluated.source
    ids, trained_ids = corpus.evaluated_ids, np.unique(np.concatenate(corpus.plan.shards))
    if isinstance(trained, FileSource) and isinstance(tested, FileSource):
        chosen, candidates = files_to_compare(tested, ids, trained, trained_ids)
        return compare(world, digests_of_files, (tested, chosen), (trained, candidates), name="overlap.files")
    if isinstance(trained, DatasetSource) and isinstance(tested, DatasetSource):
        duplicates = duplicates_by_origin(tested, ids, trained, trained_ids)
        if duplicates:
            return duplicates, len(ids)
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
) -> tuple[Duplicates, int]:
    """Return the duplicates by digests and the number of images compared; each rank hashes a share. Collective."""
    mine = [digests_of(images, ids[world.rank :: world.size]) for images, ids in (evaluated, trained)]
    everyone = world.allgather_object(mine, name=name)
    return match(*map(merged, zip(*everyone))), len(evaluated[1])


def merged(parts: Iterable[dict[int, T]]) -> dict[int, T]:
    """Merge the findings of all ranks, by sample."""
    return {sample: found for part in parts for sample, found in part.items()}
