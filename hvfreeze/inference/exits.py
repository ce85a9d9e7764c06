"""Predict with early exits: at a fixed exit, at the first confident exit, or by the ensemble of all exits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvfreeze.errors import UsageError
from hvfreeze.inference.model import Applied
from hvfreeze.model.early_exits import EarlyExits, work_until
from hvfreeze.model.modes import in_precision
from hvfreeze.model.segments import work_of
from hvfreeze.report.tables import percent

ENSEMBLE = "ensemble"


@dataclass
class Answering:
    """Prediction with the whole model."""

    applied: Applied

    def __call__(self, images: Tensor) -> Tensor:
        """Return (B, classes) float32 logits for (B, C, H, W) float32."""
        return self.applied.logits(images)

    def take(self, rows: int) -> list[dict[str, Any]]:
        """Count the first `rows` samples of the last batch, and return table columns for each."""
        return [{} for _ in range(rows)]

    def told(self) -> str:
        """Return log lines about the counted samples, if any."""
        return ""


@dataclass
class Leaving(Answering):
    """Prediction with early exits.

    Args:
        applied: the model.
        exits: the exits of the model.
        last: number of the last exit, from 0; later blocks do not run.
        confidence: probability of a class at which a sample leaves earlier; None uses `last` alone.
        together: whether to average the probabilities of all exits.
    """

    exits: EarlyExits
    last: int
    confidence: float | None = None
    together: bool = False
    counts: list[int] = field(default_factory=list)
    """Number of samples per exit."""
    _left: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        image = torch.zeros(1, *self.applied.preparation.shape)
        parts = self.exits.work(image)
        if self.confidence is None and not self.together:
            # Only the critic of the exit runs.
            parts = [(group, critic * (number == self.last)) for number, (group, critic) in enumerate(parts)]
        self._work, self._whole = work_until(parts), sum(work_of(self.exits.chain, image))
        self.counts = [0] * len(self._work)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits of each sample's exit; with `together`, the logarithm of the mean probabilities."""
        with in_precision(self.applied.card.precision):
            x = images.contiguous(memory_format=torch.channels_last)
            self._left = torch.full((len(images),), self.last)
            if self.together:
                each = torch.stack([logits.float() for logits in self.exits(x)])
                return each.log_softmax(2).logsumexp(0).log_softmax(1)
            if self.confidence is None:
                for number in range(self.last + 1):
                    x = self.exits.group(number, x)
                return self.exits.answer(self.last, x).float()
            return self._leave(x, self.confidence)

    def _leave(self, x: Tensor, confidence: float) -> Tensor:
        """Run each group on the samples that have not left."""
        inside, answers = torch.arange(len(x)), []
        for number in range(self.last + 1):
            x = self.exits.group(number, x)
            logits = self.exits.answer(number, x).float()
            sure = logits.softmax(1).amax(1) >= confidence
            leaves = sure if number < self.last else torch.ones_like(sure)
            answers.append((inside[leaves], logits[leaves]))
            self._left[inside[leaves]] = number
            inside, x = inside[~leaves], x[~leaves]
            if not len(inside):
                break
        rows, found = (torch.cat(each) for each in zip(*answers, strict=True))
        return found[rows.argsort()]

    def take(self, rows: int) -> list[dict[str, Any]]:
        """Count the samples and return the exit of each, from 1."""
        left = self._left[:rows].tolist()
        for number in left:
            self.counts[number] += 1
        return [{} if self.together else {"exit": number + 1} for number in left]

    def told(self) -> str:
        """Return a table with the share of samples and operations per exit."""
        spent = [count * work for count, work in zip(self.counts, self._work, strict=True)]
        blocks = [block.name for block in self.exits.chain.blocks]
        names = [blocks[stop - 1] for _, stop in self.exits.groups]
        width = max(6, *map(len, names))
        total, samples = max(1, sum(spent)), max(1, sum(self.counts))
        lines = [f"exit  {'behind':{width}}  samples  FLOPs of a sample    FLOPs"]
        asked = range(self.last + 1) if self.confidence is not None else [self.last]
        for number in asked:
            count, work = self.counts[number], self._work[number]
            lines.append(
                f"{number + 1:4d}  {names[number]:{width}}  {percent(count / samples):>7}  "
                f"{percent(work / self._whole):>17}  {percent(spent[number] / total):>7}"
            )
        mean = sum(spent) / samples / self._whole
        return "\n".join(
            [*lines, f"all samples together: {percent(mean)} of the FLOPs of the whole model without exits"]
        )


def answering(applied: Applied, *, exit_at: str | None, confidence: float | None) -> Answering:
    """Return the way to predict: at --exit, at the first exit with --exit-confidence, or with the whole model.

    Raises:
        UsageError: the model has no such exit, or a number is invalid.
    """
    if exit_at is None and confidence is None:
        return Answering(applied)
    flag, value = ("exit", exit_at) if exit_at is not None else ("exit-confidence", confidence)
    if applied.exits is None:
        raise UsageError(
            f"--{flag} ({value}) needs a model of --strategy local-critics, and this run's model has no exits; omit it"
        )
    count = len(applied.exits.groups)
    if confidence is not None and not 0 < confidence <= 1:
        raise UsageError(f"--exit-confidence ({confidence}) must be a probability above 0 and at most 1, such as 0.9")
    if exit_at == ENSEMBLE:
        if confidence is not None:
            raise UsageError(
                f"--exit-confidence ({confidence}) does not go with --exit ensemble, which "
                f"uses all exits; omit one of them"
            )
        return Leaving(applied, applied.exits, count - 1, together=True)
    if exit_at is not None and not (exit_at.isascii() and exit_at.isdigit() and 1 <= int(exit_at) <= count):
        raise UsageError(f"--exit ({exit_at}) must be in 1..{count}, the model's exits, or {ENSEMBLE}")
    last = count - 1 if exit_at is None else int(exit_at) - 1
    return Leaving(applied, applied.exits, last, confidence)
