"""Networks and data of typical scripts: digits, and source code to classify by its package."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Packages of Python's standard library."""
LENGTH, KNOWN = 32, 1000
"""Words per piece of code, and size of the vocabulary of the most frequent words; all others are 0."""
OF_PACKAGE = 500
"""Pieces of each package to train on, and a quarter as many to test on."""
TESTED_DIGITS = 397


class DigitsNetwork(nn.Module):
    """The network of Horovod's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for images (B, 1, 28, 28)."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = functional.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(functional.dropout(x, training=self.training))
        return logits


class CodeNetwork(nn.Module):
    """A transformer encoder, whose mean over words is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KNOWN + 1, 64)
        self.position = nn.Parameter(torch.randn(LENGTH, 64) / 10)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, len(PACKAGES))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (B, packages) for numbers of words (B, LENGTH)."""
        x = self.embedding(words) + self.position
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits enlarged to 28 pixels, 1,400 for training and 397 for testing."""
    table = load_digits()
    images = torch.from_numpy(table.images).float()[:, None] / 16
    images = (functional.interpolate(images, size=28, mode="bilinear") - 0.13) / 0.31
    labels = torch.from_numpy(table.target).long()
    trained, tested = slice(-TESTED_DIGITS), slice(-TESTED_DIGITS, None)
    return TensorDataset(images[trained], labels[trained]), TensorDataset(images[tested], labels[tested])


def code() -> tuple[TensorDataset, TensorDataset]:
    """Return pieces of the source code of `PACKAGES`; those to test on are from the last fifth of each."""
    random, root = torch.Generator().manual_seed(0), Path(sysconfig.get_path("stdlib"))
    words = {package: words_of(root / package) for package in PACKAGES}
    borders = {package: len(found) * 4 // 5 for package, found in words.items()}
    counted = Counter(word for package, found in words.items() for word in found[: borders[package]])
    # Of words that are as frequent, the order must not hang on the order of files.
    known = sorted(counted, key=lambda word: (-counted[word], word))[:KNOWN]
    numbers = {word: number for number, word in enumerate(known, 1)}
    sets: list[list[Tensor]] = [[], []]
    for package, found in words.items():
        codes, border = torch.tensor([numbers.get(word, 0) for word in found]), borders[package]
        parts = ((codes[:border], OF_PACKAGE), (codes[border:], OF_PACKAGE // 4))
        for pieces, (part, count) in zip(sets, parts, strict=True):
            starts = torch.randint(len(part) - LENGTH, (count,), generator=random)
            pieces.append(torch.stack([part[start : start + LENGTH] for start in starts.tolist()]))
    trained, tested = (
        TensorDataset(torch.cat(pieces), torch.arange(len(PACKAGES)).repeat_interleave(len(pieces[0])))
        for pieces in sets
    )
    return trained, tested


def words_of(package: Path) -> list[str]:
    """Return the words and signs of a package's source code, file after file."""
    paths = sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix())
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", text)
