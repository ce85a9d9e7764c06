"""Load a finished run's model.

applied = hvfreeze.load_model("runs/20260101-120000-resnet18-digits")
batch = torch.stack([applied.transform(Image.open(path)) for path in paths])
names = [applied.classes[row] for row in applied.logits(batch).argmax(1)]
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.heads.multilevel import MultiLevelClassifier
from hvfreeze.inference.card import Card, Preparation, TextPreparation, sha256_of
from hvfreeze.inference.finished import ModelFiles, find_model, is_unfinished, resume_advice
from hvfreeze.model.early_exits import EarlyExits, add_exits
from hvfreeze.model.model_sources import build_model, set_memory_formats
from hvfreeze.model.modes import in_precision
from hvfreeze.model.weights import read_weights


@dataclass(frozen=True, eq=False)
class Applied:
    """A model in evaluation mode with its preprocessing."""

    model: nn.Module
    """Module from (N, 3, S, S) float32 to (N, classes) logits, with gradients enabled."""
    transform: Preparation | TextPreparation
    """Preprocessing of the run's evaluation: from a PIL image or a uint8 tensor to (3, S, S) float32; for a language
    model from a text to codes."""
    classes: tuple[str, ...]
    """Names in the order of the logits: classes, labels or numbers, or the characters of a language model."""
    card: Card
    exits: EarlyExits | None = None
    """Exits of a model trained with local critics: `exits(images)` returns the (N, classes) logits of each; else None.
    """

    @property
    def preparation(self) -> Preparation:
        """Preprocessing of images. Raises UsageError for a language model."""
        if not isinstance(self.transform, Preparation):
            raise UsageError(f"the model ({self.card.model}) reads text, not images; hvfreeze predict continues a text")
        return self.transform

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return (N, classes) float32 for (N, 3, S, S) float32, in the precision of the run's evaluation.

        A language model returns (N, characters, T) for (N, T) int64 codes: logits of the next characters.
        """
        given = images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images
        with in_precision(self.card.precision):
            found: Tensor = self.model(given)
        return found.float()


def load_model(run_dir: str | os.PathLike[str], *, name: str = "model", trust_code: bool = False) -> Applied:
    """Load the model of a finished run. Random state is unchanged, and no code from the files runs by default.

    Args:
        run_dir: the run directory, or a folder with copies of its model.pt and model.yaml.
        name: name of one of several models, as in `model-head0`.
        trust_code: whether to run the user's function that builds a custom model.

    Raises:
        RefusedError: there is no finished model, a file is missing or damaged, or the files do not match.
    """
    return load_files(find_model(run_dir, name=name, trust_code=trust_code))


def load_files(files: ModelFiles) -> Applied:
    """Load the model in these files. Raises RefusedError if the weights are damaged or do not match the card."""
    weights, about, card = files.weights, files.about, files.card
    found = sha256_of(weights)
    if found != card.sha256:
        root = weights.parent
        raise RefusedError(
            f"{weights} does not match {about.name}: its SHA-256 is {found[:12]}..., not "
            f"{card.sha256[:12]}...; {resume_advice(root) if is_unfinished(root) else 'restore both files of one run'}"
        )
    state = read_weights(str(weights))
    model, exits = build(card, about)
    if isinstance(model, MultiLevelClassifier):
        state = model.make_room(state)
    own = model.state_dict()
    odd = [name for name in {**own, **state} if name not in own or name not in state]
    odd += [name for name in own if name in state and own[name].shape != state[name].shape]
    if odd:
        raise RefusedError(
            f"{about} does not fit {weights.name}: {odd[0]} differs from a {card.model} with "
            f"{len(card.classes)} classes; restore both files of one run"
        )
    model.load_state_dict(state)
    return Applied(model.eval(), card.preparation, card.classes, card, exits)


def build(card: Card, path: Path) -> tuple[nn.Module, EarlyExits | None]:
    """Build the card's architecture, head and exits with random weights, in the memory formats of training."""
    try:
        with torch.random.fork_rng(devices=[]):
            shape, classes, pool = card.preparation.shape, len(card.classes), card.pool
            head = "last" if pool is not None else card.head
            side = max(shape[1:] or shape)
            built = build_model(
                card.model, num_classes=classes, image_size=side, head=head, architecture=card.architecture
            )
            built = set_memory_formats(built, shape)
            model = built.model
            if pool is None and not card.exits:
                return model, None
            example = torch.zeros(2, *shape)
            chain = built.in_blocks(scheme=card.blocks, example=example)
            if pool is None:
                return model, add_exits(chain, card.exits, example=example, classes=classes)
            kernel = card.head.startswith("kernel:")
            classifier = MultiLevelClassifier(
                chain,
                classes=classes,
                pool=pool,
                example=example,
                kernel=kernel,
                reads_mirrored=card.reads_mirrored,
                tokens=card.tokens,
            )
            return classifier, None
    except UsageError as error:
        raise RefusedError(f"{path} cannot be applied: {error}") from error
