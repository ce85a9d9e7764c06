"""The settings of the head. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from hvfreeze.config.section import Alternative, Count, Section, setting
from hvfreeze.rules import between, choice, rule

HEADS = {"sgd": ("last", "mlp"), "exact": ("last", "multi-level"), "kernel": ("multi-level",)}
"""The heads that a --head-fit can fit. Feature sizes of blocks differ a hundredfold, too much for one learning rate."""
TOKENS = ("mean", "class", "grid")
"""Inputs that a multi-level head can read from the tokens of a block: their mean, the class token, or a grid."""

MLP_WIDTHS = (512, 512)
"""Widths of the hidden layers of `mlp` without numbers."""


def parse_mlp(flag: str, text: str) -> tuple[int, ...] | None:
    """Return the neurons of each hidden layer in `mlp` or `mlp-WxW...`, None for a text that begins otherwise.

    Raises:
        UsageError: it begins so, and is neither.
    """
    if text != "mlp" and not text.startswith("mlp-"):
        return None
    if text == "mlp":
        return MLP_WIDTHS
    found = re.fullmatch(r"mlp((?:[-x][1-9][0-9]{0,5})+)", text.replace("-", "x"))
    wanted = "mlp, or mlp-WxW... with the neurons of each hidden layer, as in mlp-2048 or mlp-512x512"
    rule(found is not None and text.count("-") == 1, flag, text, wanted)
    return tuple(int(width) for width in text.removeprefix("mlp-").split("x"))


TRAINED = Alternative("--head-fit sgd", lambda config: config.freeze.auto or not config.head.solved)
POOLED = Alternative("--head multi-level", lambda config: config.head.head == "multi-level")
KERNEL = Alternative("--head-fit kernel", lambda config: config.head.head_fit == "kernel")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Section):
    """The head: its input, and whether it is trained with the model or fitted to frozen features."""

    head: str = setting(
        "last",
        "WHICH",
        "last (of the model), mlp or mlp-WxW... (hidden layers of W neurons in its place) or multi-level (reads all "
        "blocks)",
    )
    head_fit: Annotated[str, choice("sgd", "exact", "kernel")] = setting(
        "sgd",
        "HOW",
        "sgd (trained with the model), or fitted by all ranks to frozen features: exact (logistic regression), kernel "
        "(kernel ridge regression)",
    )
    pool: Annotated[int, between(1, 64)] = setting(
        4, "P", "the feature map of each block is averaged to at most P x P cells", of=POOLED
    )
    tokens: Annotated[str, choice("auto", *TOKENS)] = setting(
        "auto",
        "WHICH",
        "tokens that the head reads from a transformer block: mean (of all), class (the class token), grid (patches, "
        "averaged to at most P x P cells) or auto (the best by leave-one-out on 500 training samples)",
        of=POOLED,
    )
    centres: Count | None = setting(
        None,
        "N",
        "kernel centres, chosen evenly from the training rows; default: all of up to 50,000 rows, else 10,000",
        of=KERNEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.head if parse_mlp("head", self.head) is None else "mlp"
        rule(kind in ("last", "mlp", "multi-level"), "head", self.head, "last, mlp, mlp-WxW... or multi-level")
        heads = HEADS[self.head_fit]
        remedy = "pass --head-fit exact or kernel too" if kind == "multi-level" else ""
        rule(kind in heads, "head", self.head, f"{' or '.join(heads)} with --head-fit {self.head_fit}", remedy)

    @property
    def token_form(self) -> str:
        """One of `TOKENS`; the mean if it is still to be chosen."""
        return "mean" if self.tokens == "auto" else self.tokens

    @property
    def solved(self) -> bool:
        """Whether the head is fitted, not trained."""
        return self.head_fit != "sgd"
