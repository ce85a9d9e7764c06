"""The settings of training and of the run, and the parsers of their values. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from hvfreeze.comm.settings import parse_compression
from hvfreeze.data.settings import HELD_OUT, IMAGES
from hvfreeze.freezing.settings import AUTO, BY_HAND
from hvfreeze.heads.settings import TRAINED
from hvfreeze.rules import Must, at_least, choice, float_or_nan, number_list, parse_parts, reads, rule
from hvfreeze.section import Alternative, By, Count, Part, Positive, Section, Steps, setting

METRICS = {
    "classes": ("accuracy", "balanced-accuracy", "macro-f1", "auroc"),
    "labels": ("average-precision", "macro-f1"),
    "numbers": ("r2", "mae"),
}
"""The metrics of each kind of label; the first is the default."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Experiment trackers, by the names of their libraries."""
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
MOST_THREADS = 4096

SGD = Alternative("--optimizer sgd", lambda config: config.optimizer.optimizer == "sgd")
UNTIMED = Alternative("a run without --time-budget", lambda config: config.run.time_budget == "none")
RESUMED = Alternative("--resume", lambda config: config.run.resume)
NAMED = Alternative("a named --optimizer", lambda config: config.optimizer.optimizer != AUTO)

Decay = Annotated[float, Must(lambda number: 0 <= number < math.inf, "0 or a positive number")]
Mixup = Annotated[float, Must(lambda alpha: 0 <= alpha <= 100, "in 0..100; 0.2 is usual, 0 is none")]
Seed = Annotated[int, Must(lambda seed: 0 <= seed < 2**63, "in 0..2^63-1")]
Threads = Annotated[int, Must(lambda count: 1 <= count <= MOST_THREADS, f"at least 1 and at most {MOST_THREADS}")]

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
    rates = number_list("head-lr", text)
    rule(all(0 < rate < math.inf for rate in rates), "head-lr", text, "positive numbers separated by commas")
    return rates


def parse_cadence(text: str) -> tuple[int, str] | None:
    """Return the number of `epochs`, or of `steps` as in `200steps`, between two checkpoints; None for `auto`.

    Raises:
        UsageError: it is neither `N` nor `Nsteps`.
    """
    if text == "auto":
        return None
    found = re.fullmatch(r"([0-9]{1,18})(steps)?", text)
    rule(found is not None, "checkpoint-every", text, "auto, a number of epochs, or of steps as in 200steps")
    assert found is not None
    return int(found.group(1)), "steps" if found.group(2) else "epochs"


def parse_duration(text: str) -> float | None:
    """Return the seconds in a time such as `90s`, `10m` or `1h30m`, None for `none`.

    Raises:
        UsageError: it is no such time, or 0.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?", text)
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    rule(total > 0, "time-budget", text, "none or a time above 0 such as 90s, 10m or 1h30m")
    return float(total)


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


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The files of the run, its start, and its evaluations."""

    seed: Seed = setting(0, "SEED", "seed of the initial weights and of dropout", brief="random seed")
    threads: Threads | None = setting(
        None,
        "N",
        "torch threads per rank; default: OMP_NUM_THREADS, else the rank's share of the cores",
        brief="torch threads per rank; default: its share of cores",
    )
    run_dir: str | None = setting(
        None,
        "DIR",
        "folder for the files of the run; default: runs/<time>-<name>",
        brief="folder for the run; default: runs/<time>-<name>",
    )
    checkpoint_every: Annotated[str, reads(parse_cadence)] = setting(
        "auto",
        "N",
        "epochs between checkpoints, or steps as in 200steps; 0: none; auto: at ends of epochs, in about 3 % of the "
        "time",
        brief="epochs, or steps as in 200steps",
    )
    evaluate_every: Annotated[int, at_least(1, "epoch")] = setting(
        1, "N", "epochs between evaluations; the last epoch and a fitted head are always evaluated", of=TRAINED
    )
    keep: Annotated[str, choice("last", "best")] = setting(
        "last",
        "WHICH",
        "model to keep: last, or best on held-out samples (--validation-fraction)",
        of=(TRAINED, BY_HAND, HELD_OUT),
    )
    metric: Annotated[str, choice(*dict.fromkeys(sum(METRICS.values(), ())))] | None = setting(
        None,
        "NAME",
        "held-out metric by which hvfreeze auto, --keep best and --early-stop compare models: accuracy, "
        "balanced-accuracy, macro-f1 or auroc for classes (default: accuracy, in hvfreeze auto the loss), "
        "average-precision (default) or macro-f1 for several labels, r2 (default) or mae for numbers",
        brief="held-out metric that decides, as macro-f1 [loss]",
        of=IMAGES,
    )
    early_stop: Annotated[int, at_least(1, "evaluation")] | None = setting(
        None,
        "N",
        "stop after N evaluations in a row without a better model on held-out samples (--validation-fraction)",
        of=(TRAINED, BY_HAND, HELD_OUT),
    )
    time_budget: Annotated[str, reads(parse_duration)] = setting(
        "none",
        "TIME",
        "time limit of the run, as in 90s, 10m or 1h30m; it determines the number of steps instead of --epochs",
        brief="limit instead of --epochs: 90s, 10m, 1h30m",
    )
    resume: bool = setting(
        False,
        "",
        "continue from the newest checkpoint in --run-dir, with its settings; start if there is none",
        brief="continue the run in --run-dir",
    )
    resume_inexact: bool = setting(
        False,
        "",
        "with --resume: continue although threads, versions, processor or number of ranks changed, not bit for bit",
        of=RESUMED,
    )
    track: Annotated[str, reads(partial(parse_parts, "track", choices=TRACKERS))] = setting(
        "none", "LIST", f"also report to experiment trackers: {', '.join(TRACKERS)}", brief=", ".join(TRACKERS)
    )
    quiet: bool = setting(
        False, "", "print errors only; log.txt in the run directory has all lines", brief="print errors only"
    )
    json: bool = setting(False, "", "print the summary as the last line", brief="print the summary as the last line")

    def __post_init__(self) -> None:
        super().__post_init__()
        # A shell passes an empty path for a variable that is not set.
        object.__setattr__(self, "run_dir", self.run_dir or None)
        rule(not self.resume or self.run_dir is not None, "resume", True, "given together with --run-dir DIR")

    def trackers(self) -> list[str]:
        """Return the names of the trackers that the run reports to."""
        return sorted(parse_parts("track", self.track, TRACKERS))

    def budget_seconds(self) -> float | None:
        """Return the time limit in seconds, None if --epochs determines the length."""
        return parse_duration(self.time_budget)

    def checkpoint_cadence(self) -> tuple[int, str] | None:
        """Return the number of `epochs` or `steps` between two checkpoints, 0 for none; None if their cost decides."""
        return parse_cadence(self.checkpoint_every)

    def evaluates(self, epoch: int) -> bool:
        """Return True if epoch `epoch`, from 0, ends with an evaluation; the last one always does."""
        return (epoch + 1) % self.evaluate_every == 0
