"""`hvfreeze predict`: classes and probabilities of images, as CSV; a language model continues a text.

path,class,probability[,class_2,probability_2,...][,exit]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvfreeze.config.data import is_table
from hvfreeze.data.folders import PassedOver, images_below
from hvfreeze.data.hub_sets import HubImages, open_images
from hvfreeze.data.images import SUFFIXES, BrokenImagesError, listed
from hvfreeze.data.own import read_image
from hvfreeze.data.reading import PixelArray
from hvfreeze.data.tables import Columns, images_in
from hvfreeze.errors import NumericsError, RefusedError, UsageError
from hvfreeze.imports import kept_for_good
from hvfreeze.inference.answers import Decoding, answers, rows_of
from hvfreeze.inference.card import Card, Preparation
from hvfreeze.inference.finished import find_model
from hvfreeze.inference.run_settings import columns_in
from hvfreeze.report.tables import to_csv, writing
from hvfreeze.runs.reading import printable
from hvfreeze.user_code import HF
from hvfreeze.wording import MOST_NAMED, plural

if TYPE_CHECKING:
    from hvfreeze.inference.exits import Answering


def predict(
    run_dir: Path,
    given: Sequence[str],
    *,
    name: str,
    out: Path | None,
    top: int | None,
    batch_size: int | None,
    drawing: Mapping[str, Any] | None = None,
    trust_code: bool = False,
    exit_at: str | None = None,
    confidence: float | None = None,
    skip_bad: bool = False,
) -> int:
    """Print the `top` classes of image files and of all images in folders, or write them to `out`; return 0.

    Images are decoded while the model is loaded, and batches are written as soon as they are computed. Unreadable
    images are named at the end. For a language model, `given` is a text, which is continued with the `Drawing` of the
    settings `drawing`. With early exits, see `answering`, the share of samples and operations per exit is printed, to
    stderr if the classes go to stdout.

    Raises:
        UsageError: a number is invalid, or for another kind of model.
        RefusedError: there is no finished model or no image, or `out` is not writable; or, after the output, images
            are unreadable without `skip_bad`, or all of them are.
        NumericsError: after the output, the model's outputs for some samples are NaN or Inf.
    """
    check_numbers(batch_size=batch_size, top=1 if top is None else top)
    files = find_model(run_dir, name=name, trust_code=trust_code)
    card = files.card
    if out is not None and out.is_dir():
        raise UsageError(f"--out ({out}) must be a file, not a folder; add a name such as {out / 'predictions.csv'}")

    def load() -> Answering:
        # Here, because these import torchvision, which takes longer than torch.
        with kept_for_good():
            from hvfreeze.inference.exits import answering
            from hvfreeze.inference.model import load_files

        return answering(load_files(files), exit_at=exit_at, confidence=confidence)

    if card.image is None:
        from hvfreeze.inference.text import Drawing, continue_text

        check_images(card, run_dir, skip_bad=skip_bad, batch_size=batch_size)
        drawn = Drawing(**drawing or {})
        return continue_text(load().applied, " ".join(given), drawn, top=top, out=out)
    if drawing:
        raise UsageError(f"--length, --temperature and --seed are for language models, and {run_dir} has {card.model}")
    if "" in given:
        raise UsageError("an IMAGE is the empty path; a shell variable may be unset")
    if card.task != "classes" and (top or 1) > 1:
        raise UsageError(f"--top ({top}) is for classes, and the model predicts {card.task}; omit it")
    if (top or 1) > len(card.classes):
        raise UsageError(f"--top ({top}) must be at most {len(card.classes)}, the number of classes")
    images = named_images(card.image, given, columns_in(run_dir))
    rows = rows_of(card, len(images), batch_size)
    with closing(Decoding(lambda row: images[row].decode(), len(images), rows=rows)) as decoding:
        classify(card, images, decoding, load(), out=out, top=top or 1, skip_bad=skip_bad)
    return 0


def classify(
    card: Card,
    images: Sequence[NamedImage],
    decoding: Decoding,
    answer: Answering,
    *,
    out: Path | None,
    top: int,
    skip_bad: bool,
) -> None:
    """Write the classes of images; see `predict`."""
    assert card.image is not None
    task, bad = card.answers, dict[int, str]()
    missing = count = 0
    with table_at(out) as write:
        for rows, logits in answers(decoding, card.image, answer, bad):
            columns = answer.take(len(logits))
            missing += sum(not task.answered(one) for one in logits)
            text = to_csv(
                [
                    {"path": images[row].name, **task.columns(one, card.classes, top=top), **more}
                    for row, one, more in zip(rows, logits, columns, strict=True)
                ],
                header=count == 0,
            )
            write(text)
            count += len(rows)
    if out is not None and count:
        classes = plural(len(card.classes), *task.nouns)
        print(f"{plural(count, 'image')} of {classes}: {printable(str(out))}")
    if answer.told() and count:
        print(printable(answer.told()), file=sys.stderr if out is None else sys.stdout)
    report_bad([printable(reason) for reason in bad.values()], count=count, skip_bad=skip_bad)
    if missing:
        raise NumericsError(note_on_missing(missing, count))


@contextmanager
def table_at(out: Path | None) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes text to the new file `out`, or prints it, without buffering."""
    if out is None:
        yield lambda text: print(printable(text), end="", flush=True)
        return
    with writing(out), out.open("wb") as file:

        def write(text: str) -> None:
            # Without a buffer, a full disk takes a part of the text without an error.
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()

        yield write


def report_bad(reasons: Sequence[str], *, count: int, skip_bad: bool) -> None:
    """Name the unreadable images on stderr; the others are `count`.

    Raises:
        BrokenImagesError: images are unreadable without `skip_bad`, or all of them are.
    """
    if len(reasons) > MOST_NAMED:
        for reason in reasons:
            print(f"hvfreeze: {reason.partition(';')[0]}", file=sys.stderr)
    if reasons and not (skip_bad and count):
        raise BrokenImagesError(reasons)
    if reasons:
        left_out = plural(len(reasons), "image")
        print(f"hvfreeze: note: {left_out} left out as unreadable: {listed(reasons)}", file=sys.stderr)


def check_images(card: Card, run_dir: Path, *, skip_bad: bool, batch_size: int | None = None) -> None:
    """Raise UsageError for flags of images with a language model."""
    for flag, given in (("--skip-bad", skip_bad), (f"--batch-size ({batch_size})", batch_size is not None)):
        if given:
            raise UsageError(f"{flag} is for images, and {run_dir} has the language model {card.model}; omit it")


def note_on_missing(count: int, of: int) -> str:
    """Return a message on `count` samples without a prediction."""
    samples = f"{count} of {plural(of, 'sample')}"
    return f"{samples} have no prediction, because the model's output is NaN or Inf; train it with a lower --lr"


def check_numbers(*, batch_size: int | None, top: int = 1) -> None:
    """Raise UsageError for invalid numbers."""
    if top < 1:
        raise UsageError(f"--top ({top}) must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size ({batch_size}) must be at least 1")


class NamedImage(NamedTuple):
    """An image to classify."""

    name: str
    """Path of the image, or its row in a dataset."""
    decode: Callable[[], PixelArray]
    """Function that returns its preprocessed pixels."""


def named_images(preparation: Preparation, given: Sequence[str], columns: Columns) -> list[NamedImage]:
    """Return the images of files, folders, tables and datasets hf:PATH, in the given order."""
    found = list[NamedImage]()

    def in_set(name: str, images: HubImages, row: int) -> PixelArray:
        return preparation.pixels(read_image(name, images, row, reading=preparation.how))

    for text in given:
        if text.startswith(HF):
            images = open_images(text, columns)
            found += [NamedImage(f"{text} {row}", partial(in_set, text, images, row)) for row in range(len(images))]
        else:
            paths = list_images([Path(text)], columns)
            found += [NamedImage(str(path), partial(preparation.pixels_of, path)) for path in paths]
    return found


def list_images(named: Sequence[Path], columns: Columns) -> list[Path]:
    """Return the given files, the sorted images in given folders and sub-folders, and the images of tables.

    `columns` are the columns of tables. Skipped files in folders are counted on stderr.
    """
    paths = []
    for path in named:
        if not os.path.lexists(path):
            raise RefusedError(f"{path} does not exist; name image files or folders of images")
        if not path.is_dir():
            paths += images_in(path, columns) if is_table(str(path)) else [path]
            continue
        passed = PassedOver()
        inside = images_below(path, passed)
        if not inside:
            raise RefusedError(f"folder {path} holds no image ({', '.join(SUFFIXES)}){passed.in_words(' but ')}")
        for note in passed.notes(path):
            print(printable(f"hvfreeze: note: {note}"), file=sys.stderr)
        paths += [path / name for name in inside]
    return paths
