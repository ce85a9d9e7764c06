"""Small datasets for the example scripts, and a text model."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

GOOD, BAD = "good great lovely bright moving funny".split(), "bad dull awful slow empty noisy".split()
OTHER = "the film plot music end was is a very rather scene cast".split()
WORDS = ["<none>", "not", *GOOD, *BAD, *OTHER]
LENGTH = 12


def digits(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return `samples` training digits and a quarter as many test digits: images (3, 32, 32) and labels."""
    table = load_digits()
    images = torch.from_numpy(table.images).float().div(8).sub(1)[:, None].expand(-1, 3, -1, -1)
    images = images.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    labels = torch.from_numpy(table.target).long()
    tested = slice(len(labels) - samples // 4, None)
    return TensorDataset(images[:samples], labels[:samples]), TensorDataset(images[tested], labels[tested])


def reviews(samples: int) -> TensorDataset:
    """Return synthetic reviews: word indices (samples, 12), padded with 0, and labels, 1 for positive."""
    random = torch.Generator().manual_seed(0)
    tokens, labels = torch.zeros(samples, LENGTH, dtype=torch.int64), torch.zeros(samples, dtype=torch.int64)

    def draw(words: list[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=random))]

    for number in range(samples):
        praise, negated = bool(torch.rand((), generator=random) < 0.5), bool(torch.rand((), generator=random) < 0.3)
        # "not" negates the next word.
        opinion = ["not"] * negated + [draw(GOOD if praise != negated else BAD)]
        before, after = (int(torch.randint(1, 5, (), generator=random)) for _ in range(2))
        words = [*(draw(OTHER) for _ in range(before)), *opinion, *(draw(OTHER) for _ in range(after))]
        tokens[number, : len(words)] = torch.tensor([WORDS.index(word) for word in words])
        labels[number] = int(praise)
    return TensorDataset(tokens, labels)


class TextClassifier(nn.Module):
    """A classifier on the mean output of a transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 32)
        self.position = nn.Parameter(torch.randn(LENGTH, 32) / 10)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, 2) for word indices (B, 12)."""
        ended = tokens == 0
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=ended)
        logits: Tensor = self.head(x.masked_fill(ended[..., None], 0).sum(1) / (~ended).sum(1, keepdim=True))
        return logits
