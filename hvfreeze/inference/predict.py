"""`hvfreeze predict`: classes and probabilities of images, as CSV; with a text's model how a text goes on.

path,class,probability[,class_2,probability_2,...][,exit]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.data.folders import PassedOver, images_below
from hvfreeze.data.hub_sets import HubImages, open_images
from hvfreeze.data.images import MOST_LISTED, SUFFIXES, BrokenImagesError, listed
from hvfreeze.data.own import picture
from hvfreeze.data.reading import PixelArray
from hvfreeze.data.settings import is_table
from hvfreeze.data.tables import Columns, images_in
from hvfreeze.errors import NumericsError, RefusedError, UsageError
from hvfreeze.inference.card import TextPreparation
from hvfreeze.inference.exits import Answering, answering
from hvfreeze.inference.model import Applied, load_model
from hvfreeze.inference.run_settings import columns_in
from hvfreeze.inference.text import Drawing, tell_on
from hvfreeze.report.tables import to_csv, writing
from hvfreeze.runs.reading import printable
from hvfreeze.user_code import HF
from hvfreeze.wording import plural

Decode = Callable[[int], PixelArray]
"""Returns the (3, H, W) uint8 pixels of sample 0..N-1, as the model's preparation gives them."""


def answers(
    applied: Applied,
    decode: Decode,
    count: int,
    *,
    batch_size: int | None,
    answer: Callable[[Tensor], Tensor],
    bad: dict[int, str],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield for each batch its samples and their (B, classes) float32 logits, in order.

    A sample that cannot be decoded is left out, and added to `bad` with the reason. Every batch is computed in the
    shape (batch_size, ...), since other shapes may give other last bits; one with fewer samples repeats its last one,
    and leaves the repetitions out of what is yielded. A `batch_size` above `count` is `count`. `decode` is called in
    threads.
    """
    rows = min(batch_size, max(1, count)) if batch_size else applied.card.batch_size
    starts = list(range(0, count, rows))
    pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="decode")

    def begin(start: int) -> list[Future[PixelArray]]:
        return [pool.submit(decode, row) for row in range(start, min(start + rows, count))]

    try:
        ahead = begin(0)
        for start in starts:
            pixels: dict[int, PixelArray] = {}
            for row, future in enumerate(ahead, start):
                try:
                    pixels[row] = future.result()
                except RefusedError as error:
                    bad[row] = str(error)
            ahead = begin(start + rows)
            if pixels:
                found = list(pixels.values())
                whole = np.stack([*found, *found[-1:] * (rows - len(found))])
                yield list(pixels), answer(applied.preparation.normalised(torch.from_numpy(whole)))[: len(found)]
    finally:
        pool.shutdown(cancel_futures=True)


def predict(
    run_dir: Path,
    given: Sequence[str],
    *,
    name: str,
    out: Path | None,
    top: int | None,
    batch_size: int | None,
    drawing: Drawing | None = None,
    trust_code: bool = False,
    exit_at: str | None = None,
    confidence: float | None = None,
    skip_bad: bool = False,
) -> int:
    """Print the `top` classes of image files, and of all images in folders, or write them to `out`; return 0.

    Each batch is written as soon as it is answered. Images that cannot be used are named at the end.
    With a text's model, `given` is a text, which is continued as `drawing` says. Where a model with exits answers at
    them, see `answering`, the share of samples and of operations of each is told, on stderr beside printed classes.

    Raises:
        UsageError: a number makes no sense, or is for another kind of model.
        RefusedError: there is no finished model, no image, or `out` cannot be written; or, once all others are
            written, images cannot be used and `skip_bad` was not given, or none can.
        NumericsError: once all are written, some have no class: the model's output for them is not finite.
    """
    check_numbers(batch_size=batch_size, top=1 if top is None else top)
    applied = load_model(run_dir, name=name, trust_code=trust_code)
    if out is not None and out.is_dir():
        raise UsageError(f"--out ({out}) must be a file, not a folder; append a name such as {out / 'predictions.csv'}")
    answer = answering(applied, exit_at=exit_at, confidence=confidence)
    if isinstance(applied.transform, TextPreparation):
        check_images(applied, run_dir, skip_bad=skip_bad, batch_size=batch_size)
        return tell_on(applied, " ".join(given), drawing or Drawing(), top=top, out=out)
    if drawing is not None:
        raise UsageError(
            f"--length, --temperature and --seed are for a text's model, and {run_dir} has {applied.card.model}"
        )
    if "" in given:
        raise UsageError("an IMAGE is the empty path; a variable of the shell may not be set")
    classify(
        applied,
        named_images(applied, given, columns_in(run_dir)),
        answer,
        out=out,
        top=top or 1,
        batch_size=batch_size,
        skip_bad=skip_bad,
    )
    return 0


def classify(
    applied: Applied,
    images: Sequence[NamedImage],
    answer: Answering,
    *,
    out: Path | None,
    top: int,
    batch_size: int | None,
    skip_bad: bool,
) -> None:
    """Tell the classes of images; see `predict`."""
    if applied.card.task != "classes" and top > 1:
        raise UsageError(
            f"--top ({top}) must be left out: it is for classes, and the model answers {applied.card.task}"
        )
    if top > len(applied.classes):
        raise UsageError(f"--top ({top}) must be at most {len(applied.classes)}, the number of classes")
    bad: dict[int, str] = {}
    missing: list[int] = []
    count = 0
    with table_at(out) as write:
        for rows in predictions(applied, images, answer, top=top, batch_size=batch_size, bad=bad, missing=missing):
            text = to_csv(rows)
            write(text if count == 0 else text.partition("\n")[2])
            count += len(rows)
    if out is not None and count:
        classes = plural(len(applied.classes), *applied.card.answers.nouns)
        print(f"{plural(count, 'image')} of {classes}: {printable(str(out))}")
    if answer.told() and count:
        print(printable(answer.told()), file=sys.stderr if out is None else sys.stdout)
    tell_bad([printable(reason) for reason in bad.values()], count=count, skip_bad=skip_bad)
    if missing:
        raise NumericsError(note_on_missing(len(missing), count))


@contextmanager
def table_at(out: Path | None) -> Iterator[Callable[[str], object]]:
    """Give what adds text to the file `out`, which is made anew, or prints it; none of it waits to be written."""
    if out is None:
        yield lambda text: print(printable(text), end="", flush=True)
        return
    with writing(out), out.open("wb") as file:

        def write(text: str) -> None:
            # Without a buffer, a disk that fills up takes a part of it and says nothing.
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()

        yield write


def tell_bad(reasons: Sequence[str], *, count: int, skip_bad: bool) -> None:
    """Name the images that cannot be used on stderr, where there are some; the others are `count`.

    Raises:
        BrokenImagesError: they are not to be skipped, or there is no other.
    """
    if len(reasons) > MOST_LISTED:
        for reason in reasons:
            print(f"hvfreeze: {reason.partition(';')[0]}", file=sys.stderr)
    if reasons and not (skip_bad and count):
        raise BrokenImagesError(reasons)
    if reasons:
        left_out = plural(len(reasons), "image")
        print(f"hvfreeze: note: {left_out} left out that cannot be used: {listed(reasons)}", file=sys.stderr)


def check_images(applied: Applied, run_dir: Path, *, skip_bad: bool, batch_size: int | None = None) -> None:
    """Raise UsageError for flags that say nothing to a text's model, which reads no images."""
    for flag, given in (("--skip-bad", skip_bad), (f"--batch-size ({batch_size})", batch_size is not None)):
        if given:
            raise UsageError(f"{flag} must be left out here: it is for images, and {run_dir} has {applied.card.model}")


def note_on_missing(count: int, of: int) -> str:
    """Return a sentence on `count` samples without an answer."""
    samples = f"{count} of {plural(of, 'sample')}"
    return f"{samples} have no answer, as the model's output for them is not finite; train it with a lower --lr"


def check_numbers(*, batch_size: int | None, top: int = 1) -> None:
    """Raise UsageError for numbers that make no sense."""
    if top < 1:
        raise UsageError(f"--top ({top}) must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size ({batch_size}) must be at least 1")


class NamedImage(NamedTuple):
    """An image to answer for."""

    name: str
    """Its path, or its row of a data set."""
    decode: Callable[[], PixelArray]
    """Returns its pixels as the model's preparation gives them."""


def named_images(applied: Applied, given: Sequence[str], columns: Columns) -> list[NamedImage]:
    """Return the images of files, folders, tables and data sets hf:PATH, in the order in which they are named."""
    preparation, found = applied.preparation, list[NamedImage]()

    def in_set(name: str, images: HubImages, row: int) -> PixelArray:
        return preparation.pixels(picture(name, images, row, reading=preparation.how))

    for text in given:
        if text.startswith(HF):
            images = open_images(text, columns)
            found += [NamedImage(f"{text} {row}", partial(in_set, text, images, row)) for row in range(len(images))]
        else:
            paths = list_images([Path(text)], columns)
            found += [NamedImage(str(path), partial(preparation.pixels_of, path)) for path in paths]
    return found


def list_images(named: Sequence[Path], columns: Columns) -> list[Path]:
    """Return the files that were named and, in their place, all images in folders and their sub-folders, sorted.

    And those that tables name, whose `columns` may have other names than usual. Tells on stderr of files in folders
    that are passed over.
    """
    paths = []
    for path in named:
        if not os.path.lexists(path):
            raise RefusedError(f"{path} does not exist; name image files, or folders that hold some")
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


def predictions(
    applied: Applied,
    images: Sequence[NamedImage],
    answer: Answering,
    *,
    top: int,
    batch_size: int | None = None,
    bad: dict[int, str],
    missing: list[int],
) -> Iterator[list[dict[str, Any]]]:
    """Yield each batch's rows, one an image: its name, the answer, of classes the `top` ones, and its exit.

    Images that cannot be used are left out, and added to `bad` by their places in `images` with the reason; those that
    have no answer are added to `missing`.
    """
    task = applied.card.answers

    def decode(row: int) -> PixelArray:
        return images[row].decode()

    for rows, logits in answers(applied, decode, len(images), batch_size=batch_size, answer=answer, bad=bad):
        columns = answer.take(len(logits))
        missing += [row for row, one in zip(rows, logits, strict=True) if not task.answered(one)]
        yield [
            {"path": images[row].name, **task.columns(one, applied.classes, top=top), **more}
            for row, one, more in zip(rows, logits, columns, strict=True)
        ]
