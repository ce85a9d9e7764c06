"""A run's samples: found, dealt out to the ranks, and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from hvfreeze.config.sections import DataConfig
from hvfreeze.data.batches import TrainFeed
from hvfreeze.data.dealing import Corpus, deal
from hvfreeze.data.decoding import Images, find_broken
from hvfreeze.data.on_disk.broken import BrokenImagesError
from hvfreeze.data.on_disk.folders import Folders
from hvfreeze.data.sets.image_set import DataSplits
from hvfreeze.data.sets.opening import list_data, open_data, prepare_data, root_of
from hvfreeze.ranks.agreement import look_once, together
from hvfreeze.ranks.world import World


def open_corpus(
    data: DataConfig, world: World, *, seed: int, batch_size: int, replicas: int, whole_batches: bool
) -> Corpus:
    """Find the data and deal it out; nothing is decoded yet.

    Collective: every rank of `world` must call this.
    """
    together(world, lambda: prepare_data(data.data, data.data_dir) if world.local_rank == 0 else None, name="download")
    root = root_of(data.data_dir).resolve()

    def look() -> tuple[Folders | None, str, dict[str, str]]:
        found = list_data(data.data, data.data_dir)
        return (found.to_send(), found.digest(), found.local) if found else (None, "", {})

    folders, local = look_once(world, look, place=str(root), what="data")
    listed = folders and folders.here(root, local)
    splits = together(
        world, lambda: open_data(data.data, data.data_dir, image_size=data.stored_size, listed=listed), name="data"
    )
    if data.skip_bad:
        splits = without_broken(splits, world)
    return together(
        world,
        lambda: deal(splits, data, seed=seed, batch_size=batch_size, replicas=replicas, whole_batches=whole_batches),
        name="shards",
    )


def without_broken(splits: DataSplits, world: World) -> DataSplits:
    """Return the splits without images that cannot be decoded, which all ranks look for together. Collective."""
    found = {}
    for part, image_set in (("train", splits.train), ("test", splits.test)):
        look = partial(find_broken, image_set, share=world.rank, shares=world.size, workers=torch.get_num_threads())
        everyone = world.allgather_object(together(world, look, name=f"broken.{part}"), name=f"broken.{part}.all")
        found[part] = replace(image_set, broken={row: why for theirs in everyone for row, why in theirs.items()})
    return replace(splits, train=found["train"], test=found["test"])


def load_feeds(world: World, load: Callable[[], tuple[TrainFeed, Images]]) -> tuple[TrainFeed, Images]:
    """Return what `load` gives on this rank; where images are broken, one message names those of all ranks. Collective.

    Raises:
        BrokenImagesError: on all ranks.
    """
    broken: list[str] = []

    def attempt() -> tuple[TrainFeed, Images] | None:
        try:
            return load()
        except BrokenImagesError as error:
            broken.extend(error.reasons)
            return None

    feeds = together(world, attempt, name="pixels")
    everyone = world.allgather_object(broken, name="pixels.broken")
    if any(everyone):
        refusal = BrokenImagesError(sorted({reason for theirs in everyone for reason in theirs}))
        refusal.everywhere = True
        raise refusal
    assert feeds is not None
    return feeds
