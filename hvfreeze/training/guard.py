"""The best state of a run of stages: what held-out samples find no better is taken back, bit for bit.

A tuned model is judged with its own last layer too, and that is kept where no solution is better.

The samples are those that choose the penalty. The stages between two solutions do not train on them, so both uses are
honest, and no test sample takes part. Every solution ends with a fit to all samples, so the state kept has one too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvfreeze.data.batches import Batch
from hvfreeze.data.decoding import Inputs
from hvfreeze.heads.solution import Solution
from hvfreeze.training.evaluation import Score, Scores
from hvfreeze.training.trial import Trial


@dataclass(frozen=True)
class Verdict:
    """What the held-out samples say of a stage's model; accuracies are 0-1."""

    stage: int
    held_out_accuracy: float
    held_out_loss: float
    kept: bool
    whole: bool = True
    """Whether of a head fitted to all other samples, not to a part of them; only like is held against like."""

    def line(self, before: Verdict | None) -> str:
        """Return it in words, beside the best verdict before it, where there is one."""
        found = f"{100 * self.held_out_accuracy:.2f} % of held-out samples right, loss {self.held_out_loss:.3f}"
        if before is None:
            return found
        compared = f"{100 * before.held_out_accuracy:.2f} %, {before.held_out_loss:.3f} before tuning"
        return f"{found}; {compared}: {'kept' if self.kept else 'taken back'}"

    def describe(self) -> dict[str, Any]:
        """Return what summary.json says of it."""
        return {name: value for name, value in asdict(self).items() if name != "stage"}


@dataclass(eq=False)
class Best:
    """A state worth going back to."""

    verdict: Verdict
    state: dict[str, Tensor]
    scores: Scores
    """On the evaluation samples; they decide nothing."""
    head: dict[str, Any]
    """What summary.json says of it."""


class HeldOut(NamedTuple):
    """This replica's samples that tuning leaves out, and their images."""

    images: Inputs
    batches: Sequence[Batch]


@dataclass(eq=False)
class Guard:
    """Judges solutions as they come, and a tuned model that no solution follows.

    `held_out` are the samples by which such a model is judged; None where nothing is tuned.
    """

    held_out: HeldOut | None = None
    best: Best | None = None
    own: Best | None = None
    """The best tuned model under its own last layer, without scores: it stands beside solutions until the run ends."""
    verdicts: list[Verdict] = field(default_factory=list)
    trial: Trial = field(default_factory=Trial)
    before_trial: dict[str, Tensor] | None = None
    """The model that tuning is tried on; None but while it is."""

    def judge(self, fit: Solution, model: nn.Module, scores: Scores, *, stage: int) -> Verdict:
        """Keep the model's state if its solution is better than all before, else put the best one back.

        Better is a lower loss on them, of a solution that has converged: it errs less often than the share of right
        answers, which a few hundred samples tell to one or two points.
        """
        trial = fit.chosen
        assert trial is not None, "a penalty that was given says nothing of held-out samples"
        best = self.best.verdict if self.best else None
        kept = best is None or (fit.converged and trial.held_out_loss < best.held_out_loss)
        verdict = Verdict(stage, trial.held_out_accuracy, trial.held_out_loss, kept, trial.whole)
        self.verdicts.append(verdict)
        if kept or self.best is None:
            self.best = Best(verdict, copied(model), scores, fit.summary())
        else:
            with torch.no_grad():
                model.load_state_dict(self.best.state)
        return verdict

    def judge_tuned(self, score: Score, *, stage: int) -> Verdict:
        """Return whether a tuned model, of this score on the held-out samples, is better than the best solution.

        A loss that is not finite is not. What is taken back is the caller's to put back: another stage opens it.
        """
        assert self.best is not None, "a solution comes before tuning"
        kept = score.loss < self.best.verdict.held_out_loss
        verdict = Verdict(stage, score.accuracy, score.loss, kept)
        self.verdicts.append(verdict)
        return verdict

    def note_own(self, score: Score, model: nn.Module, *, stage: int) -> Verdict:
        """Keep a tuned model with its own last layer, where no other such was better; a solution follows.

        Of few samples a layer that was tuned with the blocks can be better than one that is solved for them.
        """
        verdict = Verdict(stage, score.accuracy, score.loss, kept=False)
        self.verdicts.append(verdict)
        # So that a loss that is not finite is never the better one.
        if score.loss < (self.own.verdict.held_out_loss if self.own else math.inf):
            self.own = Best(verdict, copied(model), {}, {})
        return verdict

    def take_own(self) -> Best | None:
        """Return the tuned model with its own last layer where it is better than every solution, which it then is."""
        own, best = self.own, self.best
        if own is None or best is None or not own.verdict.held_out_loss < best.verdict.held_out_loss:
            return None
        kept = replace(own.verdict, kept=True)
        self.verdicts = [kept if verdict.stage == kept.stage else verdict for verdict in self.verdicts]
        self.best = replace(own, verdict=kept)
        return self.best

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; equal on all ranks."""
        best = self.best
        return {
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "trial": asdict(self.trial),
            "own": None if self.own is None else {"verdict": asdict(self.own.verdict), "state": self.own.state},
            "before_trial": self.before_trial,
            "best": None
            if best is None
            else {
                "verdict": asdict(best.verdict),
                "state": best.state,
                "scores": {name: list(score) for name, score in best.scores.items()},
                "head": best.head,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.verdicts = [Verdict(**verdict) for verdict in state["verdicts"]]
        trial = state.get("trial", {})
        # Earlier sources tried several ways; what goes on from such a checkpoint has tried none.
        self.trial = Trial() if isinstance(trial.get("after"), dict) else Trial(**trial)
        self.before_trial = state.get("before_trial")
        own = state.get("own")
        self.own = own and Best(Verdict(**own["verdict"]), own["state"], {}, {})
        kept = state["best"]
        self.best = kept and Best(
            Verdict(**kept["verdict"]),
            kept["state"],
            {name: Score(*score) for name, score in kept["scores"].items()},
            kept["head"],
        )


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
