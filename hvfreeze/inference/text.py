"""Language models: `hvfreeze predict` continues a text, `hvfreeze evaluate` measures bits per character."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.data.batches import padded_batches
from hvfreeze.data.shards import Ids
from hvfreeze.data.text import TextSource, encode, per_character, read_text
from hvfreeze.data.views import parse_augment
from hvfreeze.data.windows import Shift, Windows
from hvfreeze.errors import NumericsError, UsageError
from hvfreeze.inference.card import TextPreparation
from hvfreeze.inference.model import Applied
from hvfreeze.report.tables import percent, write_text
from hvfreeze.runs.record import finite
from hvfreeze.tasks import classes_of
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The settings of sampling characters, checked on construction."""

    length: int = 200
    """Number of characters."""
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the most probable character."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UsageError(f"--length ({self.length}) must be at least 1 character")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"--temperature ({self.temperature}) must be 0 (the most probable character) or positive")
        if not -(2**63) <= self.seed < 2**64:
            raise UsageError(f"--seed ({self.seed}) must be in -2^63..2^64-1")


def continue_text(applied: Applied, text: str, drawing: Drawing, *, top: int | None, out: Path | None) -> int:
    """Print a text and its continuation character by character, or write both to the file `out`; return 0."""
    following = continuation(applied, text, drawing, top=top)
    if out is not None:
        write_text(out, text + "".join(following))
        print(f"{plural(drawing.length, 'character')}: {out}")
        return 0
    print(text, end="")
    for character in following:
        print(character, end="", flush=True)
    print()
    return 0


def continuation(applied: Applied, text: str, drawing: Drawing, *, top: int | None = None) -> Iterator[str]:
    """Yield characters that continue `text`, sampled from the `top` most probable ones, or from all.

    The model sees the last characters within its context. Raises UsageError for an empty `text`.
    """
    assert isinstance(applied.transform, TextPreparation)
    generator, so_far = torch.Generator().manual_seed(drawing.seed), text
    for _ in range(drawing.length):
        logits = applied.logits(applied.transform(so_far))[0, :, -1].double()
        if not logits.isfinite().all():
            raise NumericsError(
                "the model's output is NaN or Inf, so it cannot continue the text; train it with a lower --lr"
            )
        # The last entry stands for unknown characters and cannot be written.
        logits[-1] = -math.inf
        character = applied.classes[draw(logits, generator, temperature=drawing.temperature, top=top)]
        so_far = (so_far + character)[-applied.transform.context :]
        yield character


def draw(logits: Tensor, generator: torch.Generator, *, temperature: float, top: int | None) -> int:
    """Sample an index of (classes,) logits by their probabilities."""
    if temperature == 0:
        return int(logits.argmax())
    best = logits.sort(descending=True, stable=True)
    count = len(logits) if top is None else min(top, len(logits))
    # Differences to the largest are 0 or less, so no temperature makes them +Inf.
    probabilities = ((best.values[:count] - best.values[0]) / temperature).softmax(0)
    return int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])


def unshifted(source: TextSource) -> Windows:
    """Return windows without offset, for evaluation."""
    return Windows(source, Shift(data_seed=0, augment=parse_augment("none")))


def windows_of(applied: Applied, path: Path) -> tuple[Windows, Ids, str]:
    """Return the windows of a text file in the model's vocabulary, their ids, and the file's name.

    Raises:
        RefusedError: the file is unreadable.
        UsageError: it is shorter than a window.
    """
    text, name = read_text(path)
    assert isinstance(applied.transform, TextPreparation)
    context = applied.transform.context
    source = TextSource(codes=encode(text, applied.classes), context=context)
    if source.windows < 1:
        raise UsageError(
            f"--data-dir ({path}) has {plural(len(text), 'character')}, and a window needs "
            f"{context + 1}; use a longer text"
        )
    return unshifted(source), np.arange(source.windows), name


def evaluate_text(
    applied: Applied, windows: Windows, ids: Ids, *, name: str, own: bool, out: Path | None, batch_size: int | None
) -> int:
    """Print the bits per character of a model on windows, write them to the folder `out`, and return 0."""
    loss, correct, count = 0.0, 0, 0
    rows = min(batch_size, len(ids)) if batch_size else applied.card.batch_size
    for batch in padded_batches(ids, windows.labels_of, rows):
        logits = applied.logits(windows.load(batch.ids, batch.views))[: batch.counted]
        labels = batch.labels[: batch.counted]
        loss += float(functional.cross_entropy(logits.double(), labels)) * labels.numel()
        correct += int((classes_of(logits) == labels).sum())
        count += labels.numel()
    found = {"characters": count, "accuracy": correct / count, "loss": loss / count, **per_character(loss / count)}
    print(
        f"{applied.card.model} on {plural(count, 'character')} of {name}: {found['bits_per_character']:.4f} bits per "
        f"character, perplexity {found['perplexity']:.3f}, {percent(correct / count, 2)} of the next characters correct"
    )
    if own:
        same = applied.card.accuracy == correct / count
        print("as the run reported" if same else f"the run reported {percent(applied.card.accuracy or 0.0, 2)}")
    if out is not None:
        write_text(out / "evaluation.json", json.dumps(finite({**found, "data": name}), indent=1) + "\n")
        print(f"numbers: {out / 'evaluation.json'}")
    return 0
