"""What a model's card says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvfreeze.applying.preparation import Preparation
from hvfreeze.config.model import HeadConfig

HEADS = re.compile(r"last|(multi-level|kernel):[1-9][0-9]?")
"""Heads that a model can have: `last` is the architecture's own; both others read every block, at P x P
cells; `multi-level:P` is linear, `kernel:P` a `KernelHead`."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model file holds, how it is applied, and what it came from."""

    model: str
    """The architecture: its name in torchvision, timm:NAME, or package:function."""
    code_sha256: str | None = None
    """Of the file of that function; None where it is none."""
    blocks: str
    """The scheme by which it was cut."""
    head: str
    """As in `HEADS`."""
    classes: tuple[str, ...]
    """In the order of the logits."""
    image: Preparation
    precision: str
    """In which it was evaluated: float32, or bfloat16 (autocast)."""
    batch_size: int
    """Rows of a batch when it was evaluated; batches of other shapes may give other last bits."""
    data: str
    """The data set that it was trained on."""
    weights: str
    """What training started from: none, DEFAULT or a file."""
    weights_sha256: str | None
    """Of that file, when training started; None where there was none."""
    accuracy: float = 0.0
    """Of the final model, 0-1."""
    accuracy_on: str
    """`test`, or `held-out` for a part of the training set."""
    epochs: int = 0
    steps: int = 0
    parameter_digest: str = ""
    """summary.json's."""
    sha256: str = ""
    """Of the model file."""
    versions: dict[str, str]
    """Of what trained it."""


def head_named(settings: HeadConfig) -> str:
    """Return the head that settings ask for, as in `HEADS`."""
    if settings.head == "last":
        return "last"
    return f"{'kernel' if settings.head_fit == 'kernel' else settings.head}:{settings.pool}"


def pool_of(card: Card) -> int | None:
    """Return the cells a side of a head that reads every block, None for the architecture's own."""
    _, _, pool = card.head.partition(":")
    return int(pool) if pool else None


def is_kernel(card: Card) -> bool:
    """Tell whether the head is a `KernelHead`."""
    return card.head.startswith("kernel:")
