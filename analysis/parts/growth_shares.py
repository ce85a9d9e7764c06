"""What one rank of many has to do beside training: of a million images on 256 ranks, measured on this one machine.

What a rank does by itself is done here; of what ranks tell each other, the others' part is made up, and no network is
in it.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hvfreeze.cache.file.format import pack_keys
from hvfreeze.cache.index import RowIndex
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.data.folders import list_folders
from hvfreeze.data.shards import ShardPlan, plan_shards
from hvfreeze.freezing.criteria import Evidence, Proposer
from hvfreeze.freezing.vote import hold_vote
from hvfreeze.runs.checkpoint_file import Saving, open_checkpoint, packed

SAMPLES, RANKS, CLASSES, BATCH = 1_000_000, 256, 1_000, 64
VIEWS = 2
PARAMETERS = 11_700_000
"""Of a ResNet-18; a checkpoint has as many numbers of the optimizer beside them."""
BLOCKS = 20


class Share(NamedTuple):
    """A piece of work."""

    what: str
    who: str
    """Does it, and how often."""
    how: str
    """`measured`, or what is made up."""
    seconds: float
    num_bytes: int
    """Sent, written or held; 0 where that is next to nothing."""


class ManyRanks(SoloWorld):
    """Rank 0 of many, of whom the others vote as it does: sums of tables are theirs too."""

    def __init__(self, size: int) -> None:
        """Take how many there are."""
        self.size, self.sent = size, 0

    def allreduce_sum(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the table with every rank's column."""
        self.sent += tensor.nbytes
        return tensor[:, :1].expand_as(tensor).clone()


def shares(*, samples: int, ranks: int) -> Iterator[Share]:
    """Yield what one of so many ranks takes for so many samples of `CLASSES` classes."""
    yield from of_tree(samples)
    labels = np.arange(samples) % CLASSES
    plan, dealt = timed(lambda: plan_shards(labels, np.arange(samples), size=ranks, batch_size=BATCH, seed=0))
    yield Share("deal the samples out", "every rank, once", "measured", dealt, sum(each.nbytes for each in plan.shards))
    yield from of_index(plan)
    yield from of_checkpoint(ranks)
    yield of_vote(ranks)


def of_tree(samples: int) -> Iterator[Share]:
    """Yield what a tree of so many images takes to be listed, digested and sent."""
    with tempfile.TemporaryDirectory() as folder:
        each = max(1, samples // CLASSES)
        for number in range(CLASSES):
            for split, images in (("train", each), ("test", 1)):
                inside = Path(folder, split, f"class-{number:04d}")
                inside.mkdir(parents=True)
                first = inside / "0.png"
                Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(first)
                for image in range(1, images):
                    os.link(first, inside / f"{image}.png")
        found, listed = timed(lambda: list_folders(Path(folder)))
    sent, packing = timed(lambda: pickle.dumps(found.to_send()))
    _, digested = timed(found.digest)
    yield Share("list the images", "a rank of each node, once", "measured, names in memory", listed + digested, 0)
    yield Share("take what rank 0 has listed", "every rank, once", "without the network", packing, len(sent))


def of_index(plan: ShardPlan) -> Iterator[Share]:
    """Yield what the index of the cache takes for one rank's samples, and for everybody's."""
    for whose, ids in (("its own rows", plan.shards[0]), ("everybody's rows", np.concatenate(plan.shards))):
        keys = pack_keys(np.repeat(ids, VIEWS), np.tile(np.arange(VIEWS), len(ids)))

        def fill_and_find(keys: Any = keys) -> int:
            index = RowIndex(keys)
            index.place(index.keys, part=0, rows=np.arange(len(index.keys)))
            for first in range(0, len(keys), BATCH):
                index.locate(keys[first : first + BATCH])
            return int(index.keys.nbytes * 3)

        held, seconds = timed(fill_and_find)
        yield Share(f"find {whose} in the cache, {VIEWS} views", "a rank, an epoch", "measured", seconds, held)


def of_checkpoint(ranks: int) -> Iterator[Share]:
    """Yield what a checkpoint of so many ranks takes to be written, and to be verified."""
    own = packed({"random": torch.get_rng_state(), "totals": {}, "processor_seconds": {}})
    shared = packed({"model": torch.zeros(PARAMETERS), "momentum": torch.zeros(PARAMETERS)})
    lengths = [len(shared), *[len(own)] * ranks]
    with tempfile.TemporaryDirectory() as folder:

        def write() -> Path:
            saving = Saving(Path(folder), step=1, size=ranks, lengths=lengths)
            for section in (shared, *[own] * ranks):
                saving.put(section)
            saving.finish()
            saving.result()
            return saving.path

        path, written = timed(write)
        _, verified = timed(lambda: open_checkpoint(path, size=ranks).section(ranks))
    made = "other ranks' sections are rank 0's"
    yield Share("write a checkpoint of a ResNet-18", "rank 0, in the background", made, written, sum(lengths))
    yield Share("verify it and read a section", "rank 0, on resuming", made, verified, sum(lengths))


def of_vote(ranks: int) -> Share:
    """Return what a vote takes beside its message."""
    world, proposers = ManyRanks(ranks), [Proposer("coherence"), Proposer("gradient-norm")]
    evidence = Evidence(
        cut=0,
        num_blocks=BLOCKS,
        has_parameters=(True,) * BLOCKS,
        previous_norms=(1.0,) * BLOCKS,
        norms=(0.9,) * BLOCKS,
        epoch=1.0,
        num_epochs=10.0,
        warmup_epochs=0.0,
        eta_max=0.1,
        gains=((1.0,) * BLOCKS,),
    )
    vote = partial(hold_vote, world, FreezeConfig(freeze="coherence"), proposers, evidence)
    _, seconds = timed(lambda: vote(weight=1.0, broken=False, step=1, epoch=1))
    what = f"vote, {len(proposers)} criteria, {BLOCKS} blocks"
    return Share(what, "every rank, each time", "other ranks vote as rank 0; without the network", seconds, world.sent)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what work gives, and how many seconds it took."""
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start
