"""`hvfreeze predict`: classes and probabilities of images, as CSV.

path,class,probability[,class_2,probability_2,...]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hvfreeze.applying.answering import answers, printable, write_output
from hvfreeze.applying.model import Applied, load
from hvfreeze.data.on_disk.folders import images_below
from hvfreeze.data.sources import SUFFIXES
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.report.csv_files import to_csv
from hvfreeze.report.units import plural


def predict(
    run_dir: Path,
    images: Sequence[Path],
    *,
    name: str,
    out: Path | None,
    top: int,
    batch_size: int | None,
    trust_code: bool = False,
) -> int:
    """Print the classes of image files, and of all images in folders, or write them to `out`; return exit code 0.

    Args:
        run_dir: a finished run's.
        images: files and folders.
        name: of the model, where the run has several.
        out: a CSV file; None prints.
        top: how many classes to tell for an image, the most probable first.
        batch_size: images at once; None is as many as in the run's evaluation.
        trust_code: run code of the user's own that makes the model.

    Raises:
        UsageError: `top` or `batch_size` makes no sense.
        RefusedError: there is no finished model, no image, a damaged one, or `out` cannot be written.
    """
    check_numbers(batch_size=batch_size, top=top)
    applied = load(run_dir, name=name, trust_code=trust_code)
    if top > len(applied.classes):
        raise UsageError(f"--top ({top}) must be at most {len(applied.classes)}, the number of classes")
    if out is not None and out.is_dir():
        raise UsageError(f"--out ({out}) must be a file, not a folder; append a name such as {out / 'predictions.csv'}")
    paths = list_images(images)
    rows = list(predictions(applied, paths, top=top, batch_size=batch_size))
    if out is None:
        print(printable(to_csv(rows)), end="")
    else:
        write_output(out, to_csv(rows))
        print(
            f"{plural(len(rows), 'image')} of {plural(len(applied.classes), 'class', 'classes')}: {printable(str(out))}"
        )
    return 0


def check_numbers(*, batch_size: int | None, top: int = 1) -> None:
    """Raise UsageError for numbers that make no sense."""
    if top < 1:
        raise UsageError(f"--top ({top}) must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size ({batch_size}) must be at least 1")


def list_images(named: Sequence[Path]) -> list[Path]:
    """Return the files that were named and, in their place, all images in folders and their sub-folders, sorted.

    Raises:
        RefusedError: there is no such file or folder, or a folder holds no image.
    """
    paths = []
    for path in named:
        if not os.path.lexists(path):
            raise RefusedError(f"{path} does not exist; name image files, or folders that hold some")
        if not path.is_dir():
            paths.append(path)
            continue
        inside = images_below(path)
        if not inside:
            raise RefusedError(f"folder {path} holds no image ({', '.join(SUFFIXES)})")
        paths += [path / name for name in inside]
    return paths


def predictions(
    applied: Applied, paths: Sequence[Path], *, top: int, batch_size: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each image file: its path, and the `top` classes with their probabilities, 0-1."""

    def decode(row: int) -> Any:
        return applied.transform.pixels_of(paths[row])

    for start, logits in answers(applied, decode, len(paths), batch_size=batch_size):
        for path, one in zip(paths[start : start + len(logits)], logits, strict=True):
            yield {"path": str(path), **best(one, applied.classes, top=top)}


def best(logits: Tensor, classes: Sequence[str], *, top: int) -> dict[str, Any]:
    """Return the most probable classes of (classes,) logits as columns; among equals the first, as in an evaluation."""
    probabilities = logits.double().softmax(0)
    order = logits.argsort(descending=True, stable=True)[:top].tolist()
    found: dict[str, Any] = {}
    for place, index in enumerate(order, 1):
        suffix = f"_{place}" if place > 1 else ""
        found |= {f"class{suffix}": classes[index], f"probability{suffix}": round(float(probabilities[index]), 6)}
    return found
