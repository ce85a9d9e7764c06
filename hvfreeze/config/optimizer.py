"""The settings of the optimizer, its schedule and the loss, and the parsers of their values. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from hvfreeze.config.data import IMAGES
from hvfreeze.config.freeze import AUTO
from hvfreeze.config.head import TRAINED
from hvfreeze.config.section import Alternative, By, Count, Part, Positive, Section, Steps, setting
from hvfreeze.rules import Must, choice, float_or_nan, number_list, reads, rule

AUTO_RATE = 3e-4
"""AdamW's learning rate in hvfreeze auto."""
AUTO_DEFAULTS = {
    "head": "multi-level",
    "head_fit": "kernel",
    "epochs": 16,
    "batch_size": 32,
    "optimizer": AUTO,
    "schedule": "cosine",
    "evaluate_every": 1000,
}
"""Defaults in hvfreeze auto, where they differ."""

SGD = Alternative("--optimizer sgd", lambda config: config.optimizer.optimizer == "sgd")
UNTIMED = Alternative("a run without --time-budget", lambda config: config.run.time_budget == "none")
NAMED = Alternative("a named --optimizer", lambda config: config.optimizer.optimizer != AUTO)

Decay = Annotated[float, Must(lambda number: 0 <= number < math.inf, "0 or a positive number")]
Mixup = Annotated[float, Must(lambda alpha: 0 <= alpha <= 100, "in 0..100; 0.2 is usual, 0 is none")]

UNWEIGHTED = 0.8
"""Share of the steps before class weights count. CIFAR-10 with 500 to 5 images a class reaches 47.4 % without weights,
50.3 % with them, and 34.1 % if they count from the first step."""


def parse_class_weights(text: str) -> str | dict[str, float] | None:
    """Return None for `none`, `balanced`, or weights by the names of classes, as in `cat=2,dog=0.5`.

    Raises:
        UsageError: it is neither, or names a class twice.
    """
    if text in ("none", "balanced"):
        return None if text == "none" else text
    pairs = [entry.rpartition("=")[::2] for entry in text.split(",")]
    weights = {name: float_or_nan(number) for name, number in pairs}
    ok = all(name and 0 < weight < math.inf for name, weight in weights.items())
    wanted = "none, balanced, or NAME=W,NAME=W,... with weights above 0, as in cat=2,dog=0.5"
    rule(ok and len(weights) == len(pairs), "class-weights", text, wanted)
    return weights


def parse_rates(text: str) -> list[float]:
    """Return the learning rates in a --head-lr value.

    Raises:
        UsageError: an entry is not a positive number.
    """
    rates = number_list("head-lr", text, each="head")
    rule(all(0 < rate < math.inf for rate in rates), "head-lr", text, "positive numbers separated by commas")
    return rates


def parse_compression(text: str) -> tuple[str, int]:
    """Return the kind of a --compression value (none, fp16, powersgd or auto), and powersgd's rank, 0 for the others.

    Raises:
        UsageError: it is neither `none`, `fp16`, `auto` nor `powersgd:R` with R from 1 to 256.
    """
    if text in ("none", "fp16", "auto"):
        return text, 0
    found = re.fullmatch(r"powersgd:([1-9][0-9]{0,2})", text)
    rank = int(found.group(1)) if found else 0
    rule(1 <= rank <= 256, "compression", text, "none, fp16, auto, or powersgd:R with R in 1..256, such as powersgd:4")
    return "powersgd", rank


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its schedule and the loss; --lr and --weight-decay have a default for each optimizer."""

    epochs: Count = setting(
        10,
        "N",
        "passes over the training samples",
        brief="most work, in passes over the training images",
        of=(TRAINED, UNTIMED),
    )
    batch_size: Count = setting(
        128,
        "N",
        "samples per rank and backward pass",
        brief="samples per rank and step; default: chosen",
    )
    accumulate: Count = setting(
        1, "N", "batches per rank and step: N backward passes, then one exchange of their mean gradient", of=TRAINED
    )
    optimizer: Annotated[str, choice("sgd", "adamw", "lars", AUTO)] = setting(
        "sgd",
        "NAME",
        "sgd, adamw, or lars (SGD with steps in proportion to each tensor)",
        of=TRAINED,
    )
    lr: Positive = setting(
        By("optimizer", sgd=0.1, adamw=1e-3, lars=3.0, auto=AUTO_RATE),
        "LR",
        "learning rate, used as given for any number of ranks",
        of=(TRAINED, NAMED),
    )
    head_lr: Annotated[str, reads(parse_rates)] | None = setting(
        None,
        "LR",
        "learning rate of the head; for several heads one for all or one each, as in 1,2",
        of=(TRAINED, NAMED),
    )
    momentum: Part = setting(0.9, "M", "of SGD and LARS; AdamW's first beta", of=TRAINED)
    nesterov: bool = setting(False, "", "Nesterov's momentum", of=(TRAINED, SGD))
    weight_decay: Decay = setting(
        By("optimizer", sgd=1e-4, adamw=1e-2, lars=1e-4, auto=1e-2), "WD", "weight decay", of=TRAINED
    )
    no_decay_norms: bool = setting(
        False, "", "no weight decay on biases and on the parameters of normalisation layers", of=TRAINED
    )
    clip_grad: Positive | None = setting(
        None,
        "NORM",
        "clip averaged gradients to this norm; votes use them before clipping, with --signal averaged after",
        of=TRAINED,
    )
    label_smoothing: Part = setting(0.0, "E", "share of each label that is spread evenly over all classes", of=TRAINED)
    loss: Annotated[str, choice("huber", "squared")] = setting(
        "huber",
        "WHICH",
        "loss of standardised numbers: huber (errors above 1 count less) or squared; a fitted head uses squared",
        of=(IMAGES, TRAINED),
    )
    class_weights: Annotated[str, reads(parse_class_weights)] = setting(
        "none",
        "HOW",
        "weights of classes in the loss: none (equal), balanced (rare classes weigh more) or NAME=W,NAME=W,... (other "
        "classes 1; only ratios matter)",
        brief="balanced: rare classes count more",
        of=IMAGES,
    )
    mixup: Mixup = setting(
        0.0,
        "ALPHA",
        "mix pairs of images and labels by a draw from Beta(ALPHA, ALPHA); if blocks are frozen, mix their output",
        of=(IMAGES, TRAINED),
    )
    schedule: Annotated[str, choice("constant", "step", "cosine")] = setting(
        "constant", "NAME", "constant, step (a tenth at 50 % and 75 %) or cosine", of=TRAINED
    )
    lr_warmup: Steps = setting(0, "STEPS", "steps over which the learning rate rises linearly to --lr", of=TRAINED)
    compression: Annotated[str, reads(parse_compression)] = setting(
        "none", "HOW", "compression of gradients: none, fp16, powersgd:R, or auto (chosen for the network)", of=TRAINED
    )
    precision: Annotated[str, choice("float32", "bfloat16")] = setting(
        "float32", "HOW", "float32, or bfloat16 (autocast; parameters stay float32)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule(not self.nesterov or self.momentum > 0, "nesterov", True, "used with a --momentum above 0")

    def steps_per_epoch(self, batches: int) -> int:
        """Return the optimizer steps in an epoch of so many batches; the last may have fewer batches."""
        return -(-batches // self.accumulate)

    def head_rates(self) -> list[float] | None:
        """Return the given learning rates of heads, None if all heads have --lr."""
        return None if self.head_lr is None else parse_rates(self.head_lr)
