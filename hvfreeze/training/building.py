"""A run's model: built from its seed, cut into blocks, and what its weights ask of images."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from hvfreeze.applying.card import read_card, sha256_of
from hvfreeze.chain.blocks import Chain, cut_into_blocks
from hvfreeze.chain.memory_formats import set_memory_formats
from hvfreeze.chain.models import build_model
from hvfreeze.chain.weights import pretrained_statistics
from hvfreeze.config.sections import ModelConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus
from hvfreeze.data.views.transform import Statistics
from hvfreeze.errors import RefusedError
from hvfreeze.heads.multilevel import solvable_chain


def build_chain(config: Config, corpus: Corpus) -> tuple[Chain, list[str]]:
    """Build the run's model from its seed; with what the user should know."""
    torch.manual_seed(config.run.seed)
    return build_for(config, corpus, len(corpus.train.classes))


def build_for(config: Config, corpus: Corpus, num_classes: int) -> tuple[Chain, list[str]]:
    """Build the model for channels_last images, in blocks; what starts at random comes from torch's generator."""
    channels, height, width = corpus.train.image_shape
    size = config.data.image_size
    built = build_model(
        config.model.model,
        num_classes=num_classes,
        weights=config.model.weights,
        reset_head=config.model.reset_head,
        image_size=size or max(height, width),
    )
    set_memory_formats(built.model, (channels, size or height, size or width))
    chain = cut_into_blocks(built.model, scheme=config.model.blocks)
    if config.head.exact:
        example = torch.zeros(2, channels, size or height, size or width)
        chain = solvable_chain(chain, config.head, classes=num_classes, example=example)
    return chain, built.notes


def statistics_of(settings: ModelConfig) -> Statistics | None:
    """Return the mean and standard deviation that images had when the weights were trained, None where nobody says.

    Torchvision says it of its own weights, and the model card that a run leaves beside its model of that.
    """
    if settings.weights == "none":
        return None
    if settings.weights == "DEFAULT":
        return pretrained_statistics(settings.model)
    path = Path(settings.weights).expanduser()
    with suppress(RefusedError):
        card = read_card(path.with_suffix(".yaml"))
        if card.sha256 == sha256_of(path):
            return card.image.mean, card.image.std
    return None
