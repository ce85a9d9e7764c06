"""A small text classifier, and reviews for it that are made up of a few words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

GOOD = "good great lovely bright moving funny".split()
BAD = "bad dull awful slow empty noisy".split()
OTHER = "the film plot music end was is a very rather scene cast".split()
WORDS = ["<none>", "not", *GOOD, *BAD, *OTHER]
LENGTH = 12


def reviews(samples: int, *, seed: int = 0) -> TensorDataset:
    """Return made-up reviews: word numbers (samples, 12), 0 where a review has ended, and 1 for praise, 0 for blame.

    "not" turns the next word into its opposite.
    """
    random = torch.Generator().manual_seed(seed)
    tokens, labels = torch.zeros(samples, LENGTH, dtype=torch.int64), torch.zeros(samples, dtype=torch.int64)

    def draw(words: list[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=random))]

    for number in range(samples):
        praise, negated = bool(torch.rand((), generator=random) < 0.5), bool(torch.rand((), generator=random) < 0.3)
        opinion = ["not"] * negated + [draw(GOOD if praise != negated else BAD)]
        before, after = (int(torch.randint(1, 5, (), generator=random)) for _ in range(2))
        words = [*(draw(OTHER) for _ in range(before)), *opinion, *(draw(OTHER) for _ in range(after))]
        tokens[number, : len(words)] = torch.tensor([WORDS.index(word) for word in words])
        labels[number] = int(praise)
    return TensorDataset(tokens, labels)


class Classifier(nn.Module):
    """A transformer encoder whose mean over words is classified."""

    def __init__(self, *, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, 2) for word numbers (B, 12)."""
        ended = tokens == 0
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=ended)
        logits: Tensor = self.head(x.masked_fill(ended[..., None], 0).sum(1) / (~ended).sum(1, keepdim=True))
        return logits
