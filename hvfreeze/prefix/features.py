"""The chain in two parts, as a step sees it: the frozen prefix's output, computed or cached, and the trained suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.data.batches import Batch, announce
from hvfreeze.data.decoding import Images
from hvfreeze.prefix.caching import Caching, NoCache
from hvfreeze.prefix.opening import CacheTerms, open_caching
from hvfreeze.prefix.splits import Recipe, RowSource, Split, prefix_digest
from hvfreeze.runs.clock import PhaseClock


@dataclass(frozen=True)
class Halves:
    """Runs the blocks before and behind a cut, in the run's precision."""

    chain: Chain
    precision: str = "float32"

    def prefix(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of frozen blocks start..stop-1 for `x`, without gradient."""
        with torch.no_grad(), self._autocast():
            return self.chain.run(x, start, stop)

    def suffix(self, features: Tensor, cut: int) -> Tensor:
        """Return the logits, (B, classes), of the blocks from `cut` on, with gradient where that is on."""
        return self.part(features, cut, len(self.chain.blocks))

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, with gradient where that is on."""
        with self._autocast():
            return self.chain.run(x, start, stop)

    def be_in_mode(self, *, training: bool) -> None:
        """Bring the model into training or evaluation mode; frozen blocks hold themselves in the latter."""
        # Walking through all modules costs as much as a small one of them.
        if self.chain.model.training != training:
            self.chain.model.train(training)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass
class Features:
    """The frozen prefix's output for the batches of one split, read where it is cached."""

    images: Images
    caching: NoCache | Caching

    @property
    def cut(self) -> int:
        """Frozen blocks whose output this is."""
        return self.caching.activations.cut

    def begin_epoch(self, batches: Sequence[Batch]) -> None:
        """Get ready for an epoch's batches, in order.

        Collective: every rank of the world must call this.
        """
        self.caching.begin_epoch(batches)
        announce(self.images, batches)

    def expect(self, batches: Sequence[Batch]) -> None:
        """Read ahead for these batches, in order, beside what an epoch began with. Not a collective."""
        self.caching.activations.announce([(batch.ids, batch.views) for batch in batches])
        announce(self.images, batches)

    def move(self, cut: int, *, before: Sequence[int] = ()) -> None:
        """Follow the cut to `cut`; `before` are the cuts that the run has had until now, on which rounded rows depend.

        Collective: every rank of the world must call this in the same step.
        """
        self.caching.move([*before, cut])

    def of(self, batch: Batch) -> Tensor:
        """Return the features of a batch, (B, ...); with cut 0 the images themselves."""
        return self.caching.activations.get(batch.ids, batch.views, counted=batch.counted)

    def close(self) -> None:
        """Keep what is cached and let go of all files."""
        self.caching.activations.close()


def open_features(terms: CacheTerms, halves: Halves, split: Split, recipe: Recipe, *, clock: PhaseClock) -> Features:
    """Return the features of `split` for a rank that has all blocks, kept as `terms` say; see `open_caching`.

    Collective: every rank of the terms' world must call this.
    """
    source = RowSource(
        split=split,
        recipe=recipe,
        chain=halves.chain,
        digest=partial(prefix_digest, halves.chain),
        load_images=split.images.load,
        run_blocks=halves.prefix,
    )
    return Features(split.images, open_caching(terms, source, clock=clock))
