"""The run's model, built as often as it is needed, always the same way, and what its weights ask of images."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hvfreeze.applying.card.file import read_card, sha256_of
from hvfreeze.chain.blocks import Chain, cut_into_blocks
from hvfreeze.chain.memory_formats import set_memory_formats
from hvfreeze.chain.models import build_model
from hvfreeze.chain.origins.makers import timm_statistics
from hvfreeze.chain.origins.weights import pretrained_statistics
from hvfreeze.config.model import HeadConfig, ModelConfig
from hvfreeze.data.dealing import Corpus
from hvfreeze.data.views.transform import Statistics, seen_shape
from hvfreeze.errors import RefusedError
from hvfreeze.heads.multilevel import solvable_chain
from hvfreeze.named_code import TIMM


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a model is built from, beside the number of its classes."""

    model: ModelConfig
    image_shape: tuple[int, int, int]
    """(C, H, W) of the images that the model sees."""
    classes: int
    """Of the data set; a strategy may want the same model for others."""

    @classmethod
    def of(cls, model: ModelConfig, corpus: Corpus, *, image_size: int | None) -> Blueprint:
        """Return the blueprint of a model for the images of `corpus`, resized to `image_size` where that is given."""
        shape = seen_shape(corpus.train.image_shape, image_size)
        return cls(model=model, image_shape=shape, classes=len(corpus.train.classes))

    def build(self, classes: int) -> tuple[Chain, list[str]]:
        """Return the model in blocks, for channels_last images, and what the user should know.

        What starts at random comes from torch's generator, whose state the caller decides.

        Raises:
            UsageError: the settings do not fit the model.
            RefusedError: the weights cannot be read, or are another model's.
        """
        settings = self.model
        built = build_model(
            settings.model,
            num_classes=classes,
            weights=settings.weights,
            reset_head=settings.reset_head,
            image_size=max(self.image_shape[1:]),
        )
        set_memory_formats(built.model, self.image_shape)
        # What torchvision does is known; any other model is compared with its own forward pass.
        other = ":" in settings.model
        example = torch.rand(2, *self.image_shape, generator=torch.Generator().manual_seed(0)) if other else None
        chain = built.chain or cut_into_blocks(built.model, scheme=settings.blocks, example=example)
        if built.chain is not None and example is not None:
            built.chain.verify(example)
        return chain, built.notes

    def solvable(self, chain: Chain, head: HeadConfig) -> Chain:
        """Return a chain that was built for the data set's classes as features and a head that can be solved.

        Raises:
            UsageError: the model has no such head.
        """
        return solvable_chain(chain, head, classes=self.classes, example=torch.zeros(2, *self.image_shape))

    def build_from(self, seed: int) -> tuple[Chain, list[str]]:
        """Return what `build` does for the data set's classes; torch's generator starts at `seed` and has moved on."""
        torch.manual_seed(seed)
        return self.build(self.classes)


def statistics_of(settings: ModelConfig) -> Statistics | None:
    """Return the mean and standard deviation that images had when the weights were trained, None where nobody says.

    Torchvision says it of its own weights, and the model card that a run leaves beside its model of that.
    """
    if settings.weights == "none":
        return None
    if settings.weights == "DEFAULT":
        timm = settings.model.startswith(TIMM)
        return timm_statistics(settings.model) if timm else pretrained_statistics(settings.model)
    path = Path(settings.weights).expanduser()
    with suppress(RefusedError):
        card = read_card(path.with_suffix(".yaml"))
        if card.sha256 == sha256_of(path):
            return card.image.mean, card.image.std
    return None
