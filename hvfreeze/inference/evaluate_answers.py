"""`hvfreeze evaluate` for models that predict several labels per sample, or numbers.

DIR/evaluation.json               metrics, and the mean loss
DIR/labels.csv, numbers.csv       metrics of every label or number
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hvfreeze.inference.answers import Decode, collect
from hvfreeze.inference.exits import Answering
from hvfreeze.inference.model import Applied
from hvfreeze.metrics import in_words
from hvfreeze.report.tables import to_csv, write_text
from hvfreeze.runs.reading import printable
from hvfreeze.runs.record import finite
from hvfreeze.wording import on_one_line


@dataclass(frozen=True, eq=False)
class Answered:
    """The metrics of a model's predictions."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    """Table rows, one per label or number."""
    loss: float
    count: int
    unanswered: int
    left_out: tuple[str, ...]
    """Reasons why samples were skipped."""

    def in_words(self, applied: Applied, name: str) -> str:
        """Return lines of text."""
        first = f"{applied.card.model} on {self.count} {name}: {in_words(self.metrics)}, loss {self.loss:.4f}"
        cells = [[on_one_line(shown(value)) for value in row.values()] for row in self.rows]
        table = [list(self.rows[0]), *cells]
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
        return printable("\n".join([first, *lines]))

    def write(self, applied: Applied, name: str, out: Path) -> None:
        """Write the numbers to the folder `out`."""
        numbers = {"samples": self.count, "left_out": len(self.left_out), **self.metrics, "loss": self.loss}
        write_evaluation(applied, name, out, numbers)
        write_text(out / f"{applied.card.task}.csv", to_csv(self.rows))


def shown(value: Any) -> str:
    """Return a cell of a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure_answers(answer: Answering, decode: Decode, labels: Tensor, *, batch_size: int | None) -> Answered:
    """Return the metrics of the model's predictions for all readable samples; `labels` are in user units.

    Raises:
        BrokenImagesError: all samples are unreadable; names them.
    """
    applied = answer.applied
    task, found = applied.card.answers, collect(answer, decode, len(labels), batch_size=batch_size)
    truth = task.from_units(labels[found.rows])
    said, known = task.kept(found.logits).numpy(), truth.numpy()
    return Answered(
        metrics=task.metrics(said, known),
        rows=task.by_output(said, known, applied.classes),
        loss=float(task.losses(found.logits.double(), truth).mean()),
        count=len(truth),
        unanswered=sum(not task.answered(one) for one in found.logits),
        left_out=found.left_out,
    )


def write_evaluation(applied: Applied, name: str, out: Path, numbers: Mapping[str, Any], **more: Any) -> None:
    """Write evaluation.json: the numbers, what they belong to, and more numbers."""
    origin = {"data": printable(name), "model": applied.card.model, "parameter_digest": applied.card.parameter_digest}
    write_text(out / "evaluation.json", json.dumps(finite({**numbers, **origin, **more}), indent=1) + "\n")
