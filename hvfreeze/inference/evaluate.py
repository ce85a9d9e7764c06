"""`hvfreeze evaluate`: the accuracy and the loss of a finished run's model, in total and per class.

DIR/evaluation.json               accuracies 0-1 and the mean loss
DIR/classes.csv                   samples, recall and precision of every class
DIR/confusion.csv                 a row per true class, a column per predicted class
DIR/confusion.png and .svg
DIR/reliability.csv               accuracy by confidence
DIR/reliability.png and .svg
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import Tensor
from torch.nn import functional

from hvfreeze.config.data import is_table
from hvfreeze.data.batches import choose
from hvfreeze.data.cifar import ARCHIVES
from hvfreeze.data.class_shares import accuracy_in_words, majority_of
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.decoding import find_broken
from hvfreeze.data.folders import absence_of, is_folder, meant_by, scan, splits_in
from hvfreeze.data.hub_sets import open_test
from hvfreeze.data.images import BrokenImagesError, listed
from hvfreeze.data.own import read_image
from hvfreeze.data.shards import Ids
from hvfreeze.data.tables import USUAL_COLUMNS, Columns, columns_of, labels_for_model, list_for_evaluation
from hvfreeze.data.text import TextSource
from hvfreeze.data.windows import Windows
from hvfreeze.errors import RefusedError
from hvfreeze.inference.answers import Decode, collect
from hvfreeze.inference.calibration import BINS, Calibration, plot_calibration
from hvfreeze.inference.card import TextPreparation
from hvfreeze.inference.evaluate_answers import Answered, measure_answers, write_evaluation
from hvfreeze.inference.exits import Answering, answering
from hvfreeze.inference.model import Applied, load_model
from hvfreeze.inference.predict import check_images, check_numbers, note_on_missing
from hvfreeze.inference.run_settings import columns_in, config_of
from hvfreeze.inference.text import evaluate_text, unshifted, windows_of
from hvfreeze.metrics import auroc, balanced_accuracy, in_words, of_classes
from hvfreeze.report.figures import STYLE, WIDE, clipped, save_figure
from hvfreeze.report.tables import percent, to_csv, write_text
from hvfreeze.runs.reading import printable
from hvfreeze.tasks import NO_ANSWER, classes_of
from hvfreeze.user_code import HF, is_named_code
from hvfreeze.wording import on_one_line, plural

MOST_NAMED, MOST_NUMBERED, LONGEST = 60, 20, 24
DEPTH = 5
MOST_PRINTED = 40
"""Number of classes above which only the worst are printed."""


def plot_confusion(confusion: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Plot the (classes, classes) confusion matrix, true classes in rows, shaded by the share of the row.

    Few classes have counts in cells; many classes are numbered instead of named.
    """
    parts = confusion / confusion.sum(1, keepdims=True).clip(min=1)
    number = len(classes)
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(WIDE, 0.85 * WIDE), layout="constrained")
        axes = figure.add_subplot()
        shaded = axes.imshow(100 * parts, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
        axes.set(xlabel="answer", ylabel="true class")
        if number <= MOST_NAMED:
            names = [clipped(name, LONGEST) for name in classes]
            turn, side = (45, "right") if number <= 10 else (90, "center")
            axes.set_xticks(range(number), names, rotation=turn, ha=side)
            axes.set_yticks(range(number), names)
        if number <= MOST_NUMBERED:
            for row, counts in enumerate(confusion.tolist()):
                for column, count in enumerate(counts):
                    colour = "white" if parts[row, column] > 0.55 else "#222222"
                    axes.text(column, row, str(count) if count else "", ha="center", va="center", color=colour)
        figure.colorbar(shaded, ax=axes, shrink=0.8, label="share of the true class (%)")
        return figure


@dataclass(frozen=True, eq=False)
class EvaluatedSamples:
    """Labelled images for an evaluation."""

    decode: Decode
    labels: Tensor
    """Indices of the model's classes, (N,) int64."""
    name: str
    """Description of the samples for a log line."""
    own: bool
    """Whether the run was evaluated on these samples."""
    notes: tuple[str, ...] = ()
    """Log lines on skipped files."""


def own_windows(applied: Applied, run_dir: Path) -> tuple[Windows, Ids, str]:
    """Return the windows of the run's evaluation, their ids, and their description."""
    config = config_of(run_dir)
    data = config.data
    _, chosen, ids = choose(open_data(data.data, data.data_dir, context=data.context), data, seed=config.data_seed)
    if chosen.classes != applied.classes or not isinstance(chosen.source, TextSource):
        raise RefusedError(
            f"the run's text has changed: it has {len(chosen.classes)} characters, and the model was trained on "
            f"{len(applied.classes)}; restore it, or name another text with --data-dir"
        )
    return unshifted(chosen.source), ids, f"the {'held-out' if data.validation_fraction > 0 else 'test'} windows"


def own_samples(applied: Applied, run_dir: Path, *, trust_code: bool = False) -> EvaluatedSamples:
    """Return the samples of the run's evaluation."""
    path, config = run_dir / "config.yaml", config_of(run_dir)
    if config.strategy.tasks is not None:
        raise RefusedError(
            f"the labels of this run come from a table ({config.strategy.tasks}), which evaluate does "
            f"not read; use --data-dir DIR, a folder with a folder per class: {', '.join(applied.classes)}"
        )
    data = config.data
    if is_named_code(data.data) and not trust_code:
        raise RefusedError(
            f"{path}: the data comes from your function {data.data}; use --trust-code to run it, or "
            f"name other data with --data-dir"
        )
    splits = open_data(
        data.data,
        data.data_dir,
        image_size=data.stored_size,
        reading=applied.preparation.how,
        skip_bad=data.skip_bad,
        task=data.task,
        columns=columns_of(data),
    )
    if data.skip_bad:
        train, test = (replace(part, broken=find_broken(part)) for part in (splits.train, splits.test))
        splits = replace(splits, train=train, test=test)
    _, image_set, ids = choose(splits, data, seed=config.data_seed)
    (_, height, width), wanted = image_set.image_shape, applied.preparation
    labels = image_set.labels[torch.from_numpy(ids)]
    classes = image_set.classes
    if image_set.kind != applied.card.task:
        raise RefusedError(
            f"the run's data ({image_set.name}) has {image_set.kind} now, and the model predicts "
            f"{applied.card.task}; restore it, or name other data with --data-dir"
        )
    now, then = ({meant_by(name) for name in names} for names in (classes, applied.classes))
    # A copied folder may encode names differently, and older models have classes without a label.
    if image_set.kind == "classes" and (now == then or (is_named_code(data.data) and now < then)):
        labels, classes = labels_for(applied, labels, classes, str), applied.classes
    if classes != applied.classes or (height, width) != (wanted.height, wanted.width):
        raise RefusedError(
            f"the run's data ({image_set.name}) has changed: it has {len(image_set.classes)} classes of images of "
            f"{width}x{height} pixels, and the model was trained on {len(applied.classes)} of "
            f"{wanted.width}x{wanted.height}; restore it, or name other data with --data-dir"
        )
    name = f"{'held-out' if data.validation_fraction > 0 else 'test'} samples of the run's data"
    return EvaluatedSamples(lambda row: image_set.decode(int(ids[row])), labels, name, own=True)


def samples_in(applied: Applied, folder: Path, columns: Columns = USUAL_COLUMNS) -> EvaluatedSamples:
    """Return the images of a folder's test split, else its val split, else its class folders; or those of an archive.

    For a table or hf:PATH, with `columns`, return the test rows, else all rows.
    """
    data = applied.card.data
    if is_table(str(folder)):
        rows = list_for_evaluation(folder, columns)
        labels = torch.from_numpy(labels_for_model(rows, columns, applied.card.task, applied.classes).of(rows))
        paths = [folder.parent / path for path in rows.paths]
        return EvaluatedSamples(
            lambda row: applied.preparation.pixels_of(paths[row]), labels, f"images of {folder}", own=False
        )
    if str(folder).startswith(HF):
        name = str(folder)
        part = open_test(name, columns, applied.card.task, applied.classes)
        prepare = applied.preparation.pixels
        return EvaluatedSamples(
            lambda row: prepare(read_image(name, part, row, reading=applied.preparation.how)),
            torch.tensor(part.targets, dtype=torch.float64 if applied.card.task == "numbers" else None),
            f"images of {name}",
            own=False,
        )
    if applied.card.task != "classes":
        raise RefusedError(
            f"--data-dir ({folder}) must be a table (CSV, TSV, Parquet): the model predicts "
            f"{applied.card.task}, and folders have classes"
        )
    if data in ARCHIVES and is_folder(folder / ARCHIVES[data].folder):
        test = open_data(data, folder).test
        labels = labels_for(applied, test.labels, test.classes, lambda name: f"class {name} of {folder}")
        prepare = applied.preparation.pixels
        return EvaluatedSamples(
            lambda row: prepare(torch.from_numpy(test.decode(row))), labels, f"test samples of {folder}", own=False
        )
    if not is_folder(folder):
        raise RefusedError(f"data folder {folder} {absence_of(folder)}; name one with --data-dir")
    splits = splits_in(folder)
    root = splits.get("test") or splits.get("val") or folder
    listing = scan(root, fewest=1, of_test=True)
    labels = labels_for(applied, listing.labels(), listing.classes, lambda name: f"class folder {root / name}")
    paths = [root / path for path in listing.paths]
    name = f"images of {root}"
    return EvaluatedSamples(
        lambda row: applied.preparation.pixels_of(paths[row]), labels, name, own=False, notes=listing.notes
    )


def labels_for(applied: Applied, labels: Tensor, classes: Sequence[str], called: Callable[[str], str]) -> Tensor:
    """Map labels from indices in `classes` to indices in the model's classes.

    Raises:
        RefusedError: the model lacks a class; the message names it by `called`.
    """
    places = {meant_by(name): place for place, name in enumerate(applied.classes)}
    for name in classes:
        if meant_by(name) not in places:
            raise RefusedError(
                f"{called(name)} is not one of the model's {len(places)} classes; rename it or remove it"
            )
    return torch.tensor([places[meant_by(name)] for name in classes])[labels]


@dataclass(frozen=True, eq=False)
class Result:
    """The predictions of a model for labelled samples, as metrics."""

    confusion: NDArray[np.int64]
    """Confusion matrix, (classes, classes): samples by true and by predicted class."""
    rows: list[dict[str, Any]]
    """Samples, predictions, correct predictions, recall and precision of each class (None: undefined)."""
    among_best: int
    """Number of samples whose class is among the five most probable."""
    loss: float
    """Mean loss over samples."""
    count: int
    correct: int
    calibration: Calibration
    """Calibration of the probabilities."""
    unanswered: int
    """Number of samples with an output of NaN or Inf; they count as wrong."""
    macro_f1: float
    """Mean F1 over classes."""
    auroc: float
    """Area under the ROC curve; NaN if too few classes have samples."""
    left_out: tuple[str, ...] = ()
    """Reasons why samples were skipped."""

    @property
    def accuracy(self) -> float:
        """Accuracy, 0-1."""
        return self.correct / self.count

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of all classes, 0-1."""
        return balanced_accuracy(*([row[key] for row in self.rows] for key in ("samples", "correct")))

    @property
    def majority(self) -> tuple[int, float] | None:
        """The most frequent class and its share of the samples; None for balanced classes."""
        return majority_of([row["samples"] for row in self.rows])

    def in_words(self) -> str:
        """Format the accuracy, with balanced accuracy and majority class for imbalanced classes."""
        if self.majority is None:
            return percent(self.accuracy, 2)
        return accuracy_in_words(self.accuracy, balanced=self.balanced_accuracy, majority=self.majority[1])


def evaluate(
    run_dir: Path,
    *,
    name: str,
    data_dir: Path | None,
    out: Path | None,
    batch_size: int | None,
    trust_code: bool = False,
    exit_at: str | None = None,
    confidence: float | None = None,
    skip_bad: bool = False,
) -> int:
    """Print the accuracy of a finished run's model, write tables and figures to the folder `out`, and return 0.

    `data_dir` is a folder with class folders, or with test/ or val/ above them, a table, or a file for a language
    model; None is the run's evaluation data. With early exits, see `answering`, the output includes the share of
    samples and operations per exit.

    Raises:
        UsageError: a number is invalid, or for another kind of model.
        RefusedError: there is no finished model, the data is missing or does not fit, or `out` is not writable; or,
            after the result, images are broken without `skip_bad`, or all of them are.
    """
    check_numbers(batch_size=batch_size)
    applied = load_model(run_dir, name=name, trust_code=trust_code)
    answer = answering(applied, exit_at=exit_at, confidence=confidence)
    if isinstance(applied.transform, TextPreparation):
        check_images(applied.card, run_dir, skip_bad=skip_bad)
        windows, ids, what = own_windows(applied, run_dir) if data_dir is None else windows_of(applied, data_dir)
        return evaluate_text(applied, windows, ids, name=what, own=data_dir is None, out=out, batch_size=batch_size)
    samples = (
        own_samples(applied, run_dir, trust_code=trust_code)
        if data_dir is None
        else samples_in(applied, data_dir, columns_in(run_dir))
    )
    result: Result | Answered
    if applied.card.task == "classes":
        result = measure(answer, samples, batch_size=batch_size)
        print(describe(applied, samples, result))
    else:
        result = measure_answers(answer, samples.decode, samples.labels, batch_size=batch_size)
        print(result.in_words(applied, samples.name))
    if answer.told():
        print(printable(answer.told()))
    out_of_all = f"{plural(len(result.left_out), 'image')} left out as unreadable: {listed(result.left_out)}"
    missing = note_on_missing(result.unanswered, result.count)
    notes = [*samples.notes, *([missing] if result.unanswered else []), *([out_of_all] if result.left_out else [])]
    for note in notes:
        print(printable(f"note: {note}"))
    if out is not None:
        if isinstance(result, Answered):
            result.write(applied, samples.name, out)
        else:
            write_result(applied, samples, result, out=out)
        print(f"tables and figures: {printable(str(out))}")
    if result.left_out and not skip_bad:
        # A result of fewer samples must not be mistaken for one of all.
        raise BrokenImagesError([printable(reason) for reason in result.left_out])
    return 0


def measure(answer: Answering, samples: EvaluatedSamples, *, batch_size: int | None = None) -> Result:
    """Return the result for all readable samples.

    Raises:
        BrokenImagesError: all samples are unreadable; names them.
    """
    found = collect(answer, samples.decode, len(samples.labels), batch_size=batch_size)
    result = judge(samples.labels[found.rows], found.logits, answer.applied.classes, sizes=found.sizes)
    return replace(result, left_out=found.left_out)


def judge(labels: Tensor, logits: Tensor, classes: Sequence[str], *, sizes: Sequence[int]) -> Result:
    """Return the result of (N, classes) logits for labels, (N,); the loss is summed by batches of these sizes."""
    truth, known, answered = labels.numpy(), range(len(classes)), classes_of(logits)
    found = answered.numpy()
    best = logits.argsort(dim=1, descending=True, stable=True)[:, :DEPTH]
    loss = sum(
        float(functional.cross_entropy(some.double(), right)) * len(right)
        for some, right in zip(logits.split(list(sizes)), labels.split(list(sizes)), strict=True)
    )
    confusion = confusion_matrix(truth, found, labels=known)
    precision, recall, _, samples = precision_recall_fscore_support(truth, found, labels=known, zero_division=0)
    rows = [
        {
            "class": name,
            "samples": int(samples[index]),
            "answered": int(confusion[:, index].sum()),
            "correct": int(confusion[index, index]),
            "recall": float(recall[index]) if samples[index] else None,
            "precision": float(precision[index]) if confusion[:, index].any() else None,
        }
        for index, name in enumerate(classes)
    ]
    return Result(
        confusion,
        rows,
        among_best=int(((best == labels[:, None]).any(1) & (answered != NO_ANSWER)).sum()),
        loss=loss / len(labels),
        count=len(labels),
        correct=int(confusion.trace()),
        calibration=Calibration.of(logits.double().softmax(1).amax(1).numpy(), found == truth),
        unanswered=int((answered == NO_ANSWER).sum()),
        macro_f1=of_classes(truth, found)["macro_f1"],
        auroc=auroc(truth, logits.numpy()),
    )


def describe(applied: Applied, samples: EvaluatedSamples, result: Result) -> str:
    """Return the accuracies in total and per class, as lines of text."""
    line = f"{applied.card.model} on {result.count} {samples.name}: "
    line += f"top-1 {percent(result.accuracy, 2)} ({result.correct} of {result.count})"
    if result.majority is not None:
        largest, share = result.majority
        line += f", balanced {percent(result.balanced_accuracy, 2)}, always predicting "
        line += f"{on_one_line(printable(applied.classes[largest]))} {percent(share, 2)}"
    if len(applied.classes) > DEPTH:
        line += f", top-{DEPTH} {percent(result.among_best / result.count, 2)}"
    lines = [f"{line}, loss {result.loss:.4f}"]
    if samples.own:
        same = applied.card.accuracy == result.accuracy
        card = applied.card
        told = accuracy_in_words(card.accuracy or 0.0, balanced=card.balanced_accuracy, majority=card.majority_share)
        lines.append("as the run reported" if same else f"the run reported {told}")
    rows = [row for row in result.rows if row["samples"]]
    if len(rows) > MOST_PRINTED:
        rows = sorted(rows, key=lambda row: row["recall"])[:MOST_PRINTED]
        lines.append(f"the {MOST_PRINTED} classes of lowest recall:")
    names = [on_one_line(printable(row["class"])) for row in rows]
    width = max(5, *map(len, names))
    lines.append(f"{'class':{width}}  samples   recall  precision")
    for name, row in zip(names, rows):
        precision = "-" if row["precision"] is None else percent(row["precision"])
        lines.append(f"{name:{width}}  {row['samples']:7d}  {percent(row['recall']):>7}  {precision:>9}")
    found, areas = result.calibration, {} if math.isnan(result.auroc) else {"auroc": result.auroc}
    lines.append(in_words({"macro_f1": result.macro_f1, **areas}))
    lines.append(
        f"mean confidence {percent(found.mean_confidence, 2)}, accuracy {result.in_words()}; expected "
        f"calibration error {percent(found.error, 2)} ({BINS} bins)"
    )
    return printable("\n".join(lines))


def write_result(applied: Applied, samples: EvaluatedSamples, result: Result, *, out: Path) -> None:
    """Write the result to the folder `out`."""
    numbers = {
        "samples": result.count,
        "left_out": len(result.left_out),
        "correct": result.correct,
        "accuracy": result.accuracy,
        "balanced_accuracy": result.balanced_accuracy,
        "majority_share": max(row["samples"] for row in result.rows) / result.count,
        "macro_f1": result.macro_f1,
        "auroc": result.auroc,
        "top5_accuracy": result.among_best / result.count,
        "loss": result.loss,
    }
    calibration = result.calibration
    sure = {"mean_confidence": calibration.mean_confidence, "expected_calibration_error": calibration.error}
    write_evaluation(applied, samples.name, out, numbers, **sure)
    write_text(out / "reliability.csv", to_csv(calibration.rows()))
    save_figure(plot_calibration(calibration), out / "reliability")
    write_text(out / "classes.csv", to_csv(result.rows))
    first = "true class"
    while first in applied.classes:
        first = f"{first} (row)"
    counts = zip(applied.classes, result.confusion.tolist(), strict=True)
    write_text(
        out / "confusion.csv", to_csv([{first: name, **dict(zip(applied.classes, row))} for name, row in counts])
    )
    save_figure(
        plot_confusion(result.confusion, [on_one_line(printable(name)) for name in applied.classes]), out / "confusion"
    )
