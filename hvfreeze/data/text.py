"""Text datasets: windows of characters, labelled with the next characters."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvfreeze.data.reading import PixelArray
from hvfreeze.errors import RefusedError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Placeholder for all characters outside the model's vocabulary."""
PIECE = 2**20
"""Characters that are encoded at a time, which takes 22 bytes per character."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSource:
    """A text in windows of equal length, as a source of samples like the images of a dataset."""

    codes: PixelArray
    """Character codes of the text, (characters,)."""
    context: int
    """Characters per window."""

    @property
    def windows(self) -> int:
        """Number of windows; a character follows each of them."""
        return (len(self.codes) - 1) // self.context

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of a window, (context,)."""
        return (self.context,)

    def decode(self, row: int) -> PixelArray:
        """Return the (context,) uint8 codes of a window."""
        window: PixelArray = self.codes[row * self.context : (row + 1) * self.context]
        return window

    def identity(self, *, local: bool) -> str:
        """Return a digest of the text in windows."""
        return hashlib.sha256(f"{self.context} ".encode() + self.codes.tobytes()).hexdigest()


def read_text(directory: str | os.PathLike[str] | None) -> tuple[str, str]:
    """Return a text and its name: a file, or the sources of Python's standard library.

    Raises:
        RefusedError: the file cannot be read.
    """
    if directory is None:
        return standard_library()
    path = Path(directory)
    try:
        # Every byte sequence is accepted; line ends become one character.
        return path.read_text(encoding="utf-8", errors="replace"), f"{path.name}"
    except OSError as error:
        raise RefusedError(
            f"--data-dir ({path}) cannot be read ({error.strerror}); name a text file, or omit "
            f"--data-dir to train on the sources of Python's standard library"
        ) from error


def standard_library() -> tuple[str, str]:
    """Return the concatenated sources of Python's standard library, and a name for them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(folder.glob("*.py"))
    text = "".join(module.read_text(encoding="utf-8", errors="replace") for module in modules)
    if not text:
        raise RefusedError(f"{folder} has no sources of Python's standard library; name a text file with --data-dir")
    return text, f"the sources of {len(modules)} modules of Python {platform.python_version()}'s standard library"


def characters_of(text: str) -> tuple[str, ...]:
    """Return the vocabulary of `text` in the order of the codes; the last entry is `UNKNOWN`.

    Characters with fewer than 8 occurrences are unknown, and all but the most frequent 255, so that a code fits a byte.
    """
    counts = Counter(text)
    del counts[UNKNOWN]
    known = [character for character, times in counts.most_common(255) if times >= 8]
    return (*sorted(known), UNKNOWN)


def encode(text: str, characters: tuple[str, ...]) -> PixelArray:
    """Return the code of each character, (len(text),) uint8; `characters` is the result of `characters_of`."""
    known = np.array([ord(character) for character in characters[:-1]], dtype=np.uint32)
    codes = np.empty(len(text), np.uint8)
    for start in range(0, len(text), PIECE):
        points = np.frombuffer(text[start : start + PIECE].encode("utf-32-le", errors="replace"), dtype="<u4")
        places = np.searchsorted(known, points).clip(max=max(0, len(known) - 1))
        found = known[places] == points if len(known) else np.zeros(len(points), dtype=np.bool_)
        codes[start : start + len(points)] = np.where(found, places, len(known))
    return codes


class TextSplits(NamedTuple):
    """A text in a training and a test part."""

    name: str
    characters: tuple[str, ...]
    train: TextSource
    test: TextSource
    length: int


def split_text(directory: str | os.PathLike[str] | None, *, context: int) -> TextSplits:
    """Split a text; its last tenth is the test set.

    Args:
        directory: a text file; None is Python's standard library.
        context: characters per window.

    Raises:
        RefusedError: the text cannot be read, or is too short for two test windows.
    """
    text, name = read_text(directory)
    border = len(text) - len(text) // 10
    # The vocabulary comes from the training part alone.
    characters = characters_of(text[:border])
    if len(text) - border < 2 * context + 1 or len(characters) < 2:
        raise RefusedError(
            f"{name} has {len(text)} characters: its last tenth, the test set, must have two windows of "
            f"--context ({context}); use a longer text"
        )
    train, test = (
        TextSource(codes=encode(part, characters), context=context) for part in (text[:border], text[border:])
    )
    return TextSplits(name, characters, train, test, len(text))


def per_character(loss: float) -> dict[str, float]:
    """Convert a mean loss in nats per character to bits per character and perplexity."""
    return {"bits_per_character": loss / math.log(2), "perplexity": math.exp(min(loss, 700.0))}
