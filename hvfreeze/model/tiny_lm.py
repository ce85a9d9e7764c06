"""A small causal Transformer for next-character prediction, with tied input and output embeddings.

The output layer uses the matrix of the embedding (Press and Wolf, EACL 2017, arXiv 1608.05859). Blocks are pre-norm, as
in GPT-2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS = 128, 6, 4
EMBEDDING = "embedding.weight"
"""Name of the shared parameter in the model."""


class Embedding(nn.Module):
    """The sum of character and position embeddings.

    Args:
        characters: size of the vocabulary.
        context: longest window, in characters.
        width: size of an embedding.
    """

    def __init__(self, characters: int, *, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(characters, width))
        self.positions = nn.Parameter(torch.empty(context, width))

    def forward(self, codes: Tensor) -> Tensor:
        """Return (B, T, width) for (B, T) int64 codes."""
        return functional.embedding(codes, self.weight) + self.positions[: codes.shape[1]]


class Layer(nn.Module):
    """A Transformer layer: causal self-attention, then a two-layer perceptron, both with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width) for (B, T, width); position t depends on positions up to t."""
        batch, length, width = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return out


class TinyLM(nn.Module):
    """The language model.

    Args:
        characters: size of the vocabulary.
        context: longest window, in characters.
        layers: number of Transformer layers.
    """

    def __init__(self, characters: int, *, context: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.context = context
        self.embedding = Embedding(characters, context=context, width=WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Smaller initial weights in front of the skip connections, so that the variance does not grow with
                # depth.
                added = name.endswith(("attention_out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def output(self, x: Tensor) -> Tensor:
        """Return logits, (B, characters, T), for the last layer's normalised output, (B, T, width).

        Classes are the second dimension, as cross-entropy expects.
        """
        return functional.linear(x, self.embedding.weight).transpose(1, 2)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of each next character, (B, characters, T), for (B, T) int64 codes."""
        return self.output(self.norm(self.layers(self.embedding(codes))))
