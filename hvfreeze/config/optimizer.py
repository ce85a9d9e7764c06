"""How parameters are updated: the optimizer, its schedule, and what the loss is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvfreeze.config.rules import number_list, one_of, parse_compression, rule, setting

LEARNING_RATES = {"sgd": 0.1, "adamw": 1e-3, "lars": 3.0}
"""--optimizer -> --lr where none is given."""
WEIGHT_DECAYS = {"sgd": 1e-4, "adamw": 1e-2, "lars": 1e-4}
"""--optimizer -> --weight-decay where none is given. AdamW's is apart from the gradient; the number is PyTorch's."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its schedule, and what the loss is; --lr and --weight-decay have a default for each optimizer."""

    epochs: int = setting(
        10, "N", "passes over the shard; with --freeze auto: work worth so many epochs of full fine-tuning", auto=1
    )
    batch_size: int = setting(128, "N", "samples per rank and backward pass")
    accumulate: int = setting(1, "N", "batches per rank and step: N backward passes, one exchange of their mean")
    optimizer: str = setting("sgd", "NAME", "sgd, adamw, or lars (SGD whose steps are in proportion to each tensor)")
    lr: float = setting(
        None,
        "LR",
        "learning rate, used as given for any number of ranks; default: 0.1, with adamw 0.001, with lars 3",
        auto=0.05,
    )
    head_lr: str | None = setting(
        None, "LR", "the head's own learning rate; with shared-trunk's several heads one for all or one each, as in 1,2"
    )
    momentum: float = setting(0.9, "M", "of SGD and LARS; AdamW's first beta")
    nesterov: bool = setting(False, "", "with sgd: Nesterov's momentum")
    weight_decay: float = setting(None, "WD", "weight decay; default: 0.0001, with adamw 0.01", auto=5e-4)
    no_decay_norms: bool = setting(False, "", "no weight decay on biases and on what norms scale and shift by")
    clip_grad: float | None = setting(
        None,
        "NORM",
        "scale averaged gradients down to at most this norm; votes see them before, --signal averaged after",
    )
    label_smoothing: float = setting(0.0, "E", "this part of each label is spread evenly over all classes")
    mixup: float = setting(
        0.0,
        "ALPHA",
        "mix pairs of images and labels by a draw from Beta(ALPHA, ALPHA); behind a cut, the frozen blocks' output",
    )
    schedule: str = setting("constant", "NAME", "constant, step (a tenth at 50 % and 75 %) or cosine", auto="cosine")
    lr_warmup: int = setting(0, "STEPS", "steps over which the learning rate rises linearly to --lr")
    compression: str = setting(
        "none", "HOW", "of gradients: none, fp16, powersgd:R, or auto (what the network asks for)"
    )
    precision: str = setting("float32", "HOW", "float32, or bfloat16 (autocast; parameters stay float32)")

    def __post_init__(self) -> None:
        rule(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        rule(self.batch_size >= 1, "batch-size", self.batch_size, "at least 1")
        rule(self.accumulate >= 1, "accumulate", self.accumulate, "at least 1")
        one_of("optimizer", self.optimizer, tuple(LEARNING_RATES))
        self._fill_in("lr", LEARNING_RATES)
        self._fill_in("weight_decay", WEIGHT_DECAYS)
        rule(math.isfinite(self.lr) and self.lr > 0, "lr", self.lr, "a positive number")
        self.head_rates()
        rule(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        nesterov_ok = not self.nesterov or (self.optimizer == "sgd" and self.momentum > 0)
        rule(nesterov_ok, "nesterov", True, "used with --optimizer sgd and a --momentum above 0")
        decay_ok = math.isfinite(self.weight_decay) and self.weight_decay >= 0
        rule(decay_ok, "weight-decay", self.weight_decay, "0 or a positive number")
        clip_ok = self.clip_grad is None or (math.isfinite(self.clip_grad) and self.clip_grad > 0)
        rule(clip_ok, "clip-grad", self.clip_grad, "a positive number")
        rule(0 <= self.label_smoothing < 1, "label-smoothing", self.label_smoothing, "in [0, 1)")
        rule(0 <= self.mixup <= 100, "mixup", self.mixup, "in 0..100; 0.2 is usual, 0 is none")
        one_of("schedule", self.schedule, ("constant", "step", "cosine"))
        rule(self.lr_warmup >= 0, "lr-warmup", self.lr_warmup, "0 or more steps")
        parse_compression(self.compression)
        one_of("precision", self.precision, ("float32", "bfloat16"))

    def steps_per_epoch(self, batches: int) -> int:
        """Return the optimizer steps of an epoch of so many batches; the last may be of fewer than the others."""
        return -(-batches // self.accumulate)

    def head_rates(self) -> list[float] | None:
        """Return the learning rates that were given for heads, None where they all have --lr."""
        if self.head_lr is None:
            return None
        rates = number_list("head-lr", self.head_lr)
        ok = all(math.isfinite(rate) and rate > 0 for rate in rates)
        rule(ok, "head-lr", self.head_lr, "positive numbers separated by commas")
        return rates

    def _fill_in(self, leaf: str, defaults: dict[str, float]) -> None:
        if getattr(self, leaf) is None:
            object.__setattr__(self, leaf, defaults[self.optimizer])
