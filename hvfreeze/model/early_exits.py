"""Models with exits: behind groups of blocks, small networks that give logits before the whole model does.

The networks are critics of local critic training (`hvfreeze.strategies.local_critics`). They lie in the model, under a
name of their own, so that one state_dict has both.
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
    """A layer group's output to logits, (B, classes).

    Maps, (B, C, H, W), are averaged to at most 8 x 8 cells; then follow a 3 x 3 convolution of 64 channels, ReLU, a
    mean over at most 4 x 4 cells, and a linear layer. Tokens, (B, T, D), are averaged, and for these and for vectors,
    (B, D), a linear layer takes the convolution's place. So a critic costs little wherever it stands.

    Args:
        shape: of the output, of any number of rows.
        classes: outputs.
        turned: the output's last side belongs in the second place: maps are (B, H, W, C), or tokens (B, D, T).

    Raises:
        UsageError: the output is none of these.
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
                f"a critic cannot read a tensor of shape {tuple(shape)}: it reads maps (B, C, H, W), tokens (B, T, D) "
                "and vectors (B, D); begin parts at other blocks (--cut-at)"
            )
        self.logits = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        if self._turned:
            x = x.movedim(-1, 1)
        if x.dim() == 3:
            x = x.mean(1)
        x = functional.relu(self.features(shrunk(x, CELLS)))
        logits: Tensor = self.logits(shrunk(x, POOLED).flatten(1))
        return logits


class Critics(nn.ModuleList):
    """The critics of a model; what they are given goes on unchanged, as an nn.Sequential runs whatever lies in it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


def shrunk(x: Tensor, most: int) -> Tensor:
    """Return maps averaged to at most `most` cells a side; anything else as it is."""
    if x.dim() < 4:
        return x
    height, width = (min(side, most) for side in x.shape[2:])
    return x if (height, width) == x.shape[2:] else functional.adaptive_avg_pool2d(x, (height, width))


@dataclass(frozen=True, eq=False)
class EarlyExits:
    """A chain in groups of blocks, with a critic behind each but the last; exit i is behind group i.

    Attributes:
        chain: its model has the critics as its submodule `CRITICS`.
        groups: blocks lo..hi-1 of each, which together are all.
        critics: one fewer.
    """

    chain: Chain
    groups: tuple[Segment, ...]
    critics: tuple[nn.Module, ...]

    def group(self, number: int, x: Tensor) -> Tensor:
        """Return the output of group `number` for `x`."""
        return self.chain.run(x, *self.groups[number])

    def answer(self, number: int, output: Tensor) -> Tensor:
        """Return the logits, (B, classes), of the exit behind a group with this output."""
        logits: Tensor = self.critics[number](output) if number < len(self.critics) else output
        return logits

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Return every exit's logits, (B, classes) each, for images (B, C, H, W)."""
        found = []
        for number in range(len(self.groups)):
            images = self.group(number, images)
            found.append(self.answer(number, images))
        return found

    @torch.no_grad()
    def work(self, image: Tensor) -> list[tuple[int, int]]:
        """Return the floating-point operations of every group, and of the critic behind it (the last has none).

        Counted, as by `work_of`, for `image`, (1, C, H, W).
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
    """Return what a sample costs that leaves at each exit, of `EarlyExits.work`: it has asked all exits before too."""
    return list(accumulate(group + critic for group, critic in parts))


def add_exits(chain: Chain, starts: Sequence[int], *, example: Tensor, classes: int) -> EarlyExits:
    """Give the chain's model critics behind the groups that end where another begins, and return its exits.

    What starts at random comes from torch's generator; of `example`, (B, C, H, W), only the shape counts.

    Args:
        chain: the model in blocks.
        starts: the blocks at which groups begin, but for the first; ascending.
        example: images.
        classes: the model's.

    Raises:
        UsageError: a critic cannot read or understand what is there, or the model has a part of the critics' name.
    """
    if hasattr(chain.model, CRITICS):
        raise UsageError(f"the model has a part {CRITICS!r} of its own, where its critics are to lie; rename it")
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
    """Return (B,), the first exit whose best probability is at least `confidence`; the last where none is.

    `probabilities` are (exits, B, classes).
    """
    sure = probabilities.amax(2) >= confidence
    sure[-1] = True
    return sure.int().argmax(0)
