"""The frozen prefix of a model whose blocks lie on several ranks: what identifies it."""

from __future__ import annotations

import hashlib

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Segment, tensors_of
from hvfreeze.ranks.world import World


class SpreadPrefix:
    """The first blocks of a chain, those that are frozen; `cuts` is what the cut has been, the present one last."""

    def __init__(self, world: World, chain: Chain) -> None:
        self.cuts: tuple[int, ...] = (0,)
        self._world, self._chain = world, chain
        self._segment: Segment = (0, 0)
        self._digests: list[str] = []

    def follow(self, cuts: tuple[int, ...], *, held: Segment) -> None:
        """Take the first `cuts[-1]` blocks for the prefix, of which this rank holds those in `held`."""
        self.cuts, self._segment = cuts, held
        del self._digests[min(cuts[-1], len(self._digests)) :]

    def learn(self) -> None:
        """Learn from all ranks what the blocks are like that have frozen since. Collective."""
        known, cut = len(self._digests), self.cuts[-1]
        if known == cut:
            return
        start, stop = self._segment
        blocks = range(max(start, known), min(stop, cut))
        mine = {block: digest_tensors(tensors_of(self._chain, (block, block + 1))) for block in blocks}
        found: dict[int, str] = {}
        for theirs in self._world.allgather_object(mine, name="grid.frozen"):
            found |= theirs
        self._digests += [found[block] for block in range(known, cut)]

    def digest(self, blocks: int) -> str:
        """Return the digest of the first `blocks` blocks, wherever they lie; after `learn`."""
        return hashlib.sha256("\n".join(self._digests[:blocks]).encode()).hexdigest()
