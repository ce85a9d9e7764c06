"""The settings of the files, the start and the evaluations of a run, and the parsers of their values. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from hvfreeze.config.data import HELD_OUT, IMAGES
from hvfreeze.config.freeze import BY_HAND
from hvfreeze.config.head import TRAINED
from hvfreeze.config.section import Alternative, Section, setting
from hvfreeze.rules import Must, at_least, choice, parse_parts, reads, rule

METRICS = {
    "classes": ("accuracy", "balanced-accuracy", "macro-f1", "auroc"),
    "labels": ("average-precision", "macro-f1"),
    "numbers": ("r2", "mae"),
}
"""The metrics of each kind of label; the first is the default."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Experiment trackers, by the names of their libraries."""
MOST_THREADS = 4096

RESUMED = Alternative("--resume", lambda config: config.run.resume)

Seed = Annotated[int, Must(lambda seed: 0 <= seed < 2**63, "in 0..2^63-1")]
Threads = Annotated[int, Must(lambda count: 1 <= count <= MOST_THREADS, f"at least 1 and at most {MOST_THREADS}")]


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
        "held-out metric that compares models in hvfreeze auto, --keep best and --early-stop: accuracy, "
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
