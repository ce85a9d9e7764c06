"""The rows of the frozen prefix's output that a rank needs, and their fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvfreeze.cache.activations import LoadImages, RunBlocks
from hvfreeze.cache.file.format import TYPE_BY_NAME
from hvfreeze.cache.fingerprint import Fingerprint, activation_fingerprint, digest_tensors
from hvfreeze.config.tree import Config
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.decoding import Inputs
from hvfreeze.data.shards import Ids
from hvfreeze.data.views import seen_shape
from hvfreeze.model.blocks import Chain
from hvfreeze.prefix.operations import operations_digest

MEMORY_FORMAT = "channels_last"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How rows are computed and stored, apart from the prefix and the samples."""

    batch_rows: int
    """Rows of every forward pass."""
    precision: str
    """`float32` or `bfloat16`."""
    kept_as: str
    """`native`, or the type that rows are rounded to."""

    @classmethod
    def of(cls, config: Config, rows: int | None = None) -> Recipe:
        """Return the recipe of rows computed in batches of `rows`; None for those of training."""
        settings = config.optimizer
        return cls(
            batch_rows=rows or settings.batch_size, precision=settings.precision, kept_as=config.cache.cache_dtype
        )

    @property
    def stored(self) -> torch.dtype | None:
        """The type that rows are rounded to; None keeps the computed type."""
        return None if self.kept_as == "native" else TYPE_BY_NAME[self.kept_as]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The samples of one split that this rank may store."""

    name: str
    """`train` or `test`."""
    image_set: ImageSet
    images: Inputs
    ids: Ids
    """(N,) sample ids; empty if there are fewer samples than ranks."""
    passes_per_epoch: float = 1.0
    """Number of passes over all samples."""
    padded: bool = False
    """Whether the last batch is padded; if not, there are whole batches only."""

    @property
    def num_views(self) -> int:
        """Number of distinct views per sample."""
        return max(1, self.images.transform.augment.num_views)

    def owned_keys(self) -> tuple[Ids, Ids]:
        """Return (sample ids, views), (N x views,) each, of every row that this rank may store."""
        views = np.arange(self.num_views, dtype=np.int64)
        return np.tile(self.ids, self.num_views), np.repeat(views, len(self.ids))

    def coming(self, epoch: int) -> list[tuple[Ids, Ids]]:
        """Return (sample ids, views), (N,) each, of as many epochs as there are views, from `epoch` on."""
        augment, seed = self.images.transform.augment, self.images.transform.data_seed
        epochs = range(epoch, epoch + self.num_views)
        return [(self.ids, augment.view_of(self.ids, epoch=later, data_seed=seed)) for later in epochs]

    def fingerprint(
        self, chain: Chain, cuts: Sequence[int], recipe: Recipe, *, prefix: str | None = None
    ) -> Fingerprint:
        """Return the fingerprint of the rows at the last of `cuts`, the cuts of the run so far.

        If blocks of the prefix are on other ranks, `prefix` is its digest.
        """
        transform, cut = self.images.transform, cuts[-1]
        return activation_fingerprint(
            prefix=prefix_digest(chain, cut) if prefix is None else prefix,
            operations={"name": type(chain.model).__name__, "sha256": operations_digest(chain, cut)},
            cut=cut,
            data={"name": self.image_set.name, "sha256": self.image_set.identity()},
            split=self.name,
            transform=transform.identity(),
            data_seed=transform.data_seed,
            augment=str(transform.augment),
            dtype=recipe.kept_as,
            input_shape=list(seen_shape(self.image_set.image_shape, transform.image_size)),
            memory_format=MEMORY_FORMAT,
            precision=recipe.precision,
            batch_rows=recipe.batch_rows,
            threads=torch.get_num_threads(),
            via=rounded_before(cuts) if recipe.stored is not None else (),
        )


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """The rows of a split, and the functions that compute them."""

    split: Split
    recipe: Recipe
    chain: Chain
    digest: Callable[[int], str]
    """Cut -> digest of the prefix, on whichever ranks its blocks are."""
    load_images: LoadImages
    """(sample ids, views) -> input of the prefix."""
    run_blocks: RunBlocks
    """Runs frozen blocks."""
    shared: bool = False
    """Whether other ranks use the samples too, so that each stores a fixed share and all read all."""

    def fingerprint(self, cuts: Sequence[int]) -> Fingerprint:
        """Return the fingerprint of the rows at the last of `cuts`, the cuts of the run so far."""
        return self.split.fingerprint(self.chain, cuts, self.recipe, prefix=self.digest(cuts[-1]))


def prefix_digest(chain: Chain, cut: int) -> str:
    """Return a digest of the first `cut` blocks' parameters and buffers."""
    return digest_tensors([*chain.named_parameters(0, cut), *chain.named_buffers(0, cut)])


def rounded_before(cuts: Sequence[int]) -> list[int]:
    """Return the cuts, ascending, at which rows were stored on the way to the last, except thawed ones."""
    via: list[int] = []
    for cut in cuts:
        via = [*(earlier for earlier in via if earlier < cut), cut]
    return [cut for cut in via[:-1] if cut > 0]
