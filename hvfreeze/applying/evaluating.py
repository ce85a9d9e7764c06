"""`hvfreeze evaluate`: how right a finished run's model is, class by class.

DIR/evaluation.json               accuracies 0-1 and the mean loss
DIR/classes.csv                   samples, recall and precision of every class
DIR/confusion.csv                 a row for each true class, a column for each that was answered
DIR/confusion.png and .svg
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.applying.answering import answers, printable, write_output
from hvfreeze.applying.confusion import plot_confusion
from hvfreeze.applying.model import Applied, load
from hvfreeze.applying.predicting import check_numbers
from hvfreeze.applying.samples import Samples, own_samples, samples_in
from hvfreeze.errors import RefusedError
from hvfreeze.report.csv_files import to_csv
from hvfreeze.report.style import save_figure
from hvfreeze.report.units import percent

DEPTH = 5
MOST_PRINTED = 40
"""With more classes than this, only the worst are printed."""


@dataclass(frozen=True, eq=False)
class Result:
    """What a model answered for labelled samples."""

    confusion: Tensor
    """(classes, classes) int64: samples by true class and by answer."""
    among_best: int
    """Samples whose class is among the five most probable."""
    loss: float
    """Mean over samples."""

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> int:
        """Number of samples whose class was answered."""
        return int(self.confusion.diagonal().sum())

    @property
    def accuracy(self) -> float:
        """0-1."""
        return self.correct / self.count


def evaluate(
    run_dir: Path,
    *,
    name: str,
    data_dir: Path | None,
    out: Path | None,
    batch_size: int | None,
    trust_code: bool = False,
) -> int:
    """Say how right a finished run's model is, and write tables and a figure to the folder `out`; return exit code 0.

    Args:
        run_dir: the run's.
        name: of the model, where the run has several.
        data_dir: a folder of class folders, with test/ or val/ above them or not; None is the run's own samples.
        out: a folder, or None.
        batch_size: images at once; None is as many as in the run's evaluation.
        trust_code: run code of the user's own that makes the model.

    Raises:
        UsageError: `batch_size` makes no sense.
        RefusedError: there is no finished model, the data is missing, damaged or does not fit, or `out` cannot be
            written.
    """
    check_numbers(batch_size=batch_size)
    applied = load(run_dir, name=name, trust_code=trust_code)
    samples = (
        own_samples(applied, run_dir, trust_code=trust_code) if data_dir is None else samples_in(applied, data_dir)
    )
    result = measure(applied, samples, batch_size=batch_size)
    say(applied, samples, result)
    if out is not None:
        write_result(applied, samples, result, out=out)
        print(f"tables and figure: {printable(str(out))}")
    return 0


def measure(applied: Applied, samples: Samples, *, batch_size: int | None = None) -> Result:
    """Return what the model answers for all samples."""
    classes = len(applied.classes)
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    among_best, loss = 0, 0.0
    for start, logits in answers(applied, samples.decode, len(samples.labels), batch_size=batch_size):
        labels = samples.labels[start : start + len(logits)]
        confusion += torch.bincount(labels * classes + logits.argmax(1), minlength=classes * classes)
        best = logits.argsort(dim=1, descending=True, stable=True)[:, :DEPTH]
        among_best += int((best == labels[:, None]).any(1).sum())
        loss += float(functional.cross_entropy(logits.double(), labels)) * len(labels)
    return Result(confusion.view(classes, classes), among_best, loss / len(samples.labels))


def say(applied: Applied, samples: Samples, result: Result) -> None:
    """Print the accuracies, of all samples and of every class."""
    line = f"{applied.card.model} on {result.count} {samples.name}: "
    line += f"top-1 {percent(result.accuracy, 2)} ({result.correct} of {result.count})"
    if len(applied.classes) > DEPTH:
        line += f", top-{DEPTH} {percent(result.among_best / result.count, 2)}"
    print(printable(f"{line}, loss {result.loss:.4f}"))
    if samples.own:
        same = applied.card.accuracy == result.accuracy
        print("as the run reported" if same else f"the run reported {percent(applied.card.accuracy, 2)}")
    rows = [row for row in class_rows(applied, result) if row["samples"]]
    if len(rows) > MOST_PRINTED:
        rows = sorted(rows, key=lambda row: row["recall"])[:MOST_PRINTED]
        print(f"the {MOST_PRINTED} classes of lowest recall:")
    width = max(5, *(len(printable(row["class"])) for row in rows))
    print(f"{'class':{width}}  samples   recall  precision")
    for row in rows:
        precision = "-" if row["precision"] is None else percent(row["precision"])
        print(f"{printable(row['class']):{width}}  {row['samples']:7d}  {percent(row['recall']):>7}  {precision:>9}")


def class_rows(applied: Applied, result: Result) -> list[dict[str, Any]]:
    """Return for each class its samples, the part of them that was found, and how often its answer was right."""
    rows = []
    for index, name in enumerate(applied.classes):
        right = int(result.confusion[index, index])
        samples, answered = int(result.confusion[index].sum()), int(result.confusion[:, index].sum())
        row: dict[str, Any] = {"class": name, "samples": samples, "answered": answered, "correct": right}
        row["recall"] = right / samples if samples else None
        row["precision"] = right / answered if answered else None
        rows.append(row)
    return rows


def write_result(applied: Applied, samples: Samples, result: Result, *, out: Path) -> None:
    """Write what was found to the folder `out`.

    Raises:
        RefusedError: it cannot be written.
    """
    found = {
        "samples": result.count,
        "correct": result.correct,
        "accuracy": result.accuracy,
        "top5_accuracy": result.among_best / result.count,
        "loss": result.loss,
        "data": printable(samples.name),
        "model": applied.card.model,
        "parameter_digest": applied.card.parameter_digest,
    }
    write_output(out / "evaluation.json", json.dumps(found, indent=1) + "\n")
    write_output(out / "classes.csv", to_csv(class_rows(applied, result)))
    table = [
        {"true class": name, **dict(zip(applied.classes, row, strict=True))}
        for name, row in zip(applied.classes, result.confusion.tolist(), strict=True)
    ]
    write_output(out / "confusion.csv", to_csv(table))
    try:
        save_figure(plot_confusion(result.confusion, [printable(name) for name in applied.classes]), out / "confusion")
    except OSError as error:
        raise RefusedError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
