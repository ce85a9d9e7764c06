"""What an experiment is: a question, the runs that answer it, and what is made of their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from hvfreeze.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question answered in one sentence, with a number and its spread."""

    question: str
    text: str
    n: int
    negative: bool = False
    """Whether the method did not keep what one would hope of it: the whole interval says so, not its middle."""
    undecided: bool = False
    """Whether the runs are too few or too much alike to answer it."""

    @property
    def mark(self) -> str:
        """What stands before an answer that is no success; empty where nothing does."""
        return "negative" if self.negative else "no answer yet" if self.undecided else ""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of an experiment."""

    name: str
    caption: str
    figure: Figure


def nothing_more(preset: Preset, results: Results) -> list[PlannedRun]:
    """Return no further runs."""
    return []


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A named set of runs, and what is made of their rows. The last three take results that may be incomplete."""

    name: str
    title: str
    runs: Callable[[Preset], list[PlannedRun]]
    answers: Callable[[Results], list[Answer]]
    tables: Callable[[Results], list[Table]]
    drawings: Callable[[Results], list[Drawing]]
    limits: tuple[str, ...]
    """What the results do not show, one sentence each."""
    chooses_lr: bool = False
    """Whether its first runs choose the learning rate of the others, instead of the baseline's."""
    reference: str = ""
    """The label of full fine-tuning among its runs, on their own data; empty where there is no one such label."""
    shown: int = 1
    """How many of the tables its README.md shows; the page shows all."""
    then: Callable[[Preset, Results], list[PlannedRun]] = nothing_more
    """Runs that depend on what the first ones gave."""
