"""What a rank asks of those before it in its line, between steps: the prefix's output for images of its choice.

The rank that holds the first block that trains keeps the frozen prefix's output. What it lacks comes along with the
steps; but rows that an epoch leaves out, and a few of every file that it finds, it must have computed. Those before it
then serve, until it says that it has what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.chain.segments import Boundary, Segment
from hvfreeze.data.decoding import Images
from hvfreeze.data.draws import Ids
from hvfreeze.prefix.features import Halves
from hvfreeze.ranks.mesh import Mesh
from hvfreeze.ranks.wire import Wire

ERRANDS = "errands"
"""The lane. The numbers of its messages: how many rows come next, none to end; their images; what became of them."""
COUNT, IMAGES, OUTPUT = range(3)


class Errands:
    """Runs the prefix for the cache of partition `reader`, wherever its blocks lie.

    Args:
        mesh: this rank's place.
        segments: who holds which blocks.
        reader: the partition whose cache it is.
        halves: run this rank's blocks.
        wire: to the neighbours.
        boundaries: by the rows of a batch, and then by depth.
    """

    def __init__(
        self,
        mesh: Mesh,
        segments: Sequence[Segment],
        reader: int,
        *,
        halves: Halves,
        wire: Wire,
        boundaries: Mapping[int, Sequence[Boundary]],
    ) -> None:
        self._mesh, self._reader, self._segment = mesh, reader, segments[mesh.partition]
        self._halves, self._wire, self._boundaries = halves, wire, boundaries
        self._served = False
        self.came: Tensor | None = None
        """In a step: what has come through the line, of which the rows that are asked for next are computed."""

    @contextmanager
    def served(self) -> Iterator[None]:
        """On the reader: let the ranks before this one serve meanwhile, who are in `serve`."""
        self._served = True
        try:
            yield
        finally:
            self._served = False
            for partition in range(self._reader):
                self._tell(partition, 0)
            self._wire.drain()

    def serve(self) -> None:
        """On a rank before the reader: run its blocks for what the reader asks, until it has what it needs."""
        (start, stop), reader = self._segment, self._mesh.rank_of(self._reader)
        while rows := int(self._wire.get((1,), dtype=torch.int64, source=reader, lane=ERRANDS, seq=COUNT)):
            if self._mesh.before is None:
                x = self._get(0, rows, source=reader, seq=IMAGES)
            else:
                x = self._get(start, rows, source=self._mesh.before, seq=OUTPUT)
            assert self._mesh.after is not None, "the reader comes after"
            self._put(stop, self._halves.prefix(x, start, stop), to=self._mesh.after, seq=OUTPUT)
            self._wire.drain()

    def load(self, images: Images, ids: Ids, views: Ids) -> Tensor:
        """Return images, (B, C, H, W); none where what they become has come already."""
        return images.load(ids, views) if self.came is None else torch.empty(0)

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of frozen blocks start..stop-1 for `x`, which has start 0 where not all are held here.

        Raises:
            CacheFault: rows were stored, so that nothing of theirs has come, and they are stored no more.
        """
        own = self._segment[0]
        if start < own:
            x, start = self._brought(x), own
        return self._halves.prefix(x, start, stop)

    def _brought(self, images: Tensor) -> Tensor:
        """Return what comes to this rank's blocks for these images."""
        if self.came is not None:
            return self.came
        if not self._served:
            raise CacheFault(
                "cached rows are lost in the middle of an epoch; go on from the last checkpoint (--resume)"
            )
        for partition in range(self._reader):
            self._tell(partition, len(images))
        self._put(0, images, to=self._mesh.rank_of(0), seq=IMAGES)
        assert self._mesh.before is not None, "blocks before this rank's are held before it"
        return self._get(self._segment[0], len(images), source=self._mesh.before, seq=OUTPUT)

    def _tell(self, partition: int, rows: int) -> None:
        self._wire.put(torch.tensor([rows]), to=self._mesh.rank_of(partition), lane=ERRANDS, seq=COUNT)

    def _put(self, depth: int, x: Tensor, *, to: int, seq: int) -> None:
        self._wire.put(self._boundaries[len(x)][depth].flat(x.detach()), to=to, lane=ERRANDS, seq=seq)

    def _get(self, depth: int, rows: int, *, source: int, seq: int) -> Tensor:
        boundary = self._boundaries[rows][depth]
        shape = (boundary.num_elements,)
        return boundary.formed(self._wire.get(shape, dtype=boundary.dtype, source=source, lane=ERRANDS, seq=seq))
