"""Early exits: small networks after groups of blocks that predict before the whole model has run.

These are the critics of local critic training (`hvfreeze.strategies.local_critics`). They are a submodule of the model,
so one state_dict holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.map_layout import channels_last, tokens_last
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.segments import Segment, operations_counted

CRITICS = "local_critics"
"""The submodule of a model that holds its critics."""
WIDTH, CELLS, POOLED = 64, 8, 4


class Critic(nn.Module):
    """A small classifier from the output of a layer group to logits, (B, classes).

    Maps, (B, C, H, W), are averaged to at most 8 x 8 cells, followed by a 3 x 3 convolution of 64 channels, ReLU, a
    mean over at most 4 x 4 cells, and a linear layer. Tokens, (B, T, D), are averaged; these and vectors, (B, D), have
    a linear layer instead of the convolution. A critic is cheap after every layer.

    Args:
        shape: shape of the group's output, with any number of rows.
        classes: number of outputs.
        turned: whether to move the last dimension to the second place: maps are (B, H, W, C), or tokens (B, D, T).

    Raises:
        UsageError: the output has another shape.
    """

    def __init__(self, shape: Sequence[int], *, classes: int, turned: bool = False) -> None:
        super().__init__()
        self._turned = turned
        shape = [shape[0], shape[-1], *shape[1:-1]] if turned else shape
        self.features: nn.Module
        if len(shape) == 4:
            channels, *sides = shape[1:]
            self.features = nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(self.features.weight, nonlinearity="relu")
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            cells = [min(side, POOLED) for side in sides]
            inputs = WIDTH * cells[0] * cells[1]
        elif len(shape) in (2, 3):
            self.features, inputs = nn.Linear(shape[-1], WIDTH), WIDTH
        else:
            raise UsageError(
                f"a critic cannot read a tensor of shape {tuple(shape)}: it reads maps (B, C, H, W), "
                f"tokens (B, T, D) and vectors (B, D); start parts at other blocks with --cut-at"
            )
        self.logits = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        if self._turned:
            x = x.movedim(-1, 1)
        if x.dim() == 3:
            x = x.mean(1)
        x = functional.relu(self.features(shrink(x, CELLS)))
        logits: Tensor = self.logits(shrink(x, POOLED).flatten(1))
        return logits


class Critics(nn.ModuleList):
    """The critics of a model. Calling them returns the input, so they can be a child of an nn.Sequential."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


def shrink(x: Tensor, most: int) -> Tensor:
    """Average maps to at most `most` cells a side; return other tensors unchanged."""
    if x.dim() < 4:
        return x
    height, width = (min(side, most) for side in x.shape[2:])
    return x if (height, width) == x.shape[2:] else functional.adaptive_avg_pool2d(x, (height, width))


@dataclass(frozen=True, eq=False)
class EarlyExits:
    """A chain in groups of blocks, with a critic after each group but the last; exit i is after group i.

    Attributes:
        chain: the chain, whose model has the critics as its submodule `CRITICS`.
        groups: blocks lo..hi-1 of each group, which together are all blocks.
        critics: the critics, one per group but the last.
    """

    chain: Chain
    groups: tuple[Segment, ...]
    critics: tuple[nn.Module, ...]

    def group(self, number: int, x: Tensor) -> Tensor:
        """Return the output of group `number` for `x`."""
        return self.chain.run(x, *self.groups[number])

    def answer(self, number: int, output: Tensor) -> Tensor:
        """Return the logits, (B, classes), of the exit after a group with this output."""
        logits: Tensor = self.critics[number](output) if number < len(self.critics) else output
        return logits

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Return the logits of all exits, (B, classes) each, for images (B, C, H, W)."""
        found = []
        for number in range(len(self.groups)):
            images = self.group(number, images)
            found.append(self.answer(number, images))
        return found

    @torch.no_grad()
    def work(self, image: Tensor) -> list[tuple[int, int]]:
        """Count the floating-point operations of each group and of its critic, if any, for `image`, (1, C, H, W).

        See `work_of`.
        """
        found = []
        with in_evaluation(self.chain.model):
            for number in range(len(self.groups)):
                with operations_counted() as of_group:
                    image = self.group(number, image)
                with operations_counted() as of_critic:
                    self.answer(number, image)
                found.append((of_group.get_total_flops(), of_critic.get_total_flops()))
        return found


def work_until(parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the operations of a sample that leaves at each exit, from `EarlyExits.work`, with all earlier exits."""
    return list(accumulate(group + critic for group, critic in parts))


def add_exits(chain: Chain, starts: Sequence[int], *, example: Tensor, classes: int) -> EarlyExits:
    """Add critics to a chain's model, after the groups before `starts`, and return the exits.

    Random weights come from torch's generator.

    Args:
        chain: the model in blocks.
        starts: first blocks of the groups after the first one, ascending.
        example: images, (B, C, H, W); only their shape is used.
        classes: number of classes of the model.

    Raises:
        UsageError: a critic cannot read a group's output, or the model has a submodule with the critics' name.
    """
    if hasattr(chain.model, CRITICS):
        raise UsageError(f"the model has a part {CRITICS!r} , the name of its critics; rename it")
    groups = tuple(pairwise((0, *starts, len(chain.blocks))))
    stops, critics = [stop for _, stop in groups[:-1]], []
    last, swapped = channels_last(chain, stops, example=example), tokens_last(chain, stops, example=example)
    with torch.no_grad(), in_evaluation(chain.model):
        for group, known, tokens in zip(groups, last, swapped):
            example = chain.run(example, *group)
            critics.append(Critic(example.shape, classes=classes, turned=bool(known) or tokens))
    chain.model.add_module(CRITICS, Critics(critics))
    return EarlyExits(chain, groups, tuple(critics))


def first_sure(probabilities: Tensor, confidence: float) -> Tensor:
    """Return the first exit of each sample whose best probability is at least `confidence`, else the last, (B,).

    `probabilities` are (exits, B, classes).
    """
    sure = probabilities.amax(2) >= confidence
    sure[-1] = True
    return sure.int().argmax(0)
