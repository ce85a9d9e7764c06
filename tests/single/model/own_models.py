"""A model that somebody wrote: two inputs, a loose parameter and buffer, glue between parts, the head defined first."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Text(nn.Module):
    """A small transformer encoder with a mask."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)
        self.embedding = nn.Embedding(20, width)
        self.position = nn.Parameter(torch.randn(1, 6, width))
        layers = [nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)]
        self.encoder = nn.ModuleList(layers)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits (B, 3) for ids (B, 6) and a mask (B, 6), true where there is no word."""
        x = self.embedding(ids) * self.scale + self.position
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=mask)
        logits: Tensor = self.head(x.masked_fill(mask[..., None], 0).mean(1)) * self.temperature
        return logits


def tokens(rows: int = 4) -> tuple[Tensor, Tensor]:
    """Return a batch of inputs."""
    ids = torch.randint(0, 20, (rows, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(rows, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return ids, mask
