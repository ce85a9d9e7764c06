"""Build a model in blocks from its settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.config.model import ModelConfig
from hvfreeze.data.batches import Corpus
from hvfreeze.data.views import seen_shape
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import build_model, set_memory_formats
from hvfreeze.model.modes import in_evaluation, state_kept


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Settings that determine a model, which is built in blocks."""

    model: ModelConfig
    image_shape: tuple[int, ...]
    """Shape of the model's input: (C, H, W) for images, (T,) for windows of text."""
    classes: int
    """Number of classes of the dataset; a strategy may build the model with another number."""
    head: str = "last"
    """Value of --head."""

    @classmethod
    def of(cls, model: ModelConfig, corpus: Corpus, *, image_size: int | None, head: str = "last") -> Blueprint:
        """Return the blueprint of a model for the images of `corpus`, resized to `image_size` if that is given."""
        shape = seen_shape(corpus.train.image_shape, image_size)
        return cls(model=model, image_shape=shape, classes=len(corpus.train.classes), head=head)

    def build(self, classes: int) -> tuple[Chain, list[str]]:
        """Build the model in blocks for channels_last images, and return it with notes.

        Random weights come from torch's generator, which the caller seeds.

        Raises:
            UsageError: the settings do not fit the model.
            RefusedError: the weights are unreadable or belong to another model.
        """
        settings = self.model
        built = build_model(
            settings.model,
            num_classes=classes,
            weights=settings.weights,
            reset_head=settings.reset_head,
            image_size=max(self.image_shape[1:] or self.image_shape),
            head=self.head,
        )
        built = set_memory_formats(built, self.image_shape)
        # torchvision's models are known; other models are compared with their own forward pass.
        other = ":" in settings.model
        example = self.example() if other else None
        chain = built.in_blocks(scheme=settings.blocks, example=example)
        if built.chain is not None and example is not None:
            chain.verify(example)
        if example is not None:
            self.check_outputs(chain, example, classes=classes)
        return chain, built.notes

    @torch.no_grad()
    def check_outputs(self, chain: Chain, example: Tensor, *, classes: int) -> None:
        """Raise UsageError unless a model that is not torchvision's returns one logit per class."""
        # Logits of text are (N, classes, T), and a multi-level head replaces the model's own.
        if len(self.image_shape) == 1 or self.head == "multi-level":
            return
        with state_kept(chain.model), in_evaluation(chain.model):
            shape = tuple(chain(example).shape)
        if shape != (len(example), classes):
            raise UsageError(
                f"--model ({self.model.model}) returns a tensor of shape {shape} for {len(example)} "
                f"images instead of {(len(example), classes)}, one logit per class; give its last "
                f"layer num_classes outputs, the argument of the function"
            )

    def example(self) -> Tensor:
        """Return two random, reproducible samples as model input."""
        shape, generator = (2, *self.image_shape), torch.Generator().manual_seed(0)
        if len(self.image_shape) == 1:
            return torch.randint(self.classes, shape, generator=generator)
        return torch.rand(shape, generator=generator)

    def build_from(self, seed: int) -> tuple[Chain, list[str]]:
        """Seed torch's generator with `seed` and build the model for the dataset's classes."""
        torch.manual_seed(seed)
        return self.build(self.classes)
