"""Buckets: runs of parameters whose gradients travel together, in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.errors import UsageError
from hvfreeze.ranks.exchange.halves import HalfCopy

TYPES = (torch.float32, torch.float64)
"""What Horovod sums without loss; it does not know bfloat16, and float16 sums would lose what gradients need."""

Send = Callable[[Tensor, str], list[Any]]


@dataclass
class Bucket:
    """A run of parameters of one type, last first."""

    name: str
    slots: list[int]
    flat: Tensor
    views: list[Tensor]
    """Each slot's part of `flat`, with its parameter's shape and strides."""
    half: HalfCopy | None
    size: int
    """How many ranks the sum is over."""
    scale: float = 1.0
    """What a gradient is multiplied by on its way into `flat`."""
    missing: int = 0
    version: int = 0
    """Of `flat`, since which nobody may have written to it until it is summed."""
    handles: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Wait for all slots again."""
        self.missing, self.handles = len(self.slots), []
        # Before a sum of large halves could overflow; on the way, where it costs nothing.
        self.scale = 1 / self.size if self.half is None else self.half.next_scale() / self.size

    def lay_down(self, place: int, gradient: Tensor | None) -> Tensor:
        """Take this rank's gradient of the slot at `place`, None for zero; return where the average will be."""
        if gradient is None:
            self.views[place].zero_()
        else:
            torch.mul(gradient, self.scale, out=self.views[place])
        self.missing -= 1
        return self.views[place]

    @property
    def payload_bytes(self) -> int:
        """Gradient bytes that a rank hands over in a step."""
        return self.flat.nbytes if self.half is None else self.half.values.nbytes

    @property
    def tail_bytes(self) -> int:
        """What a rank hands over beside them."""
        return 0 if self.half is None else self.half.tail_bytes

    def start(self, send: Send) -> None:
        """Start on the way what all slots have filled."""
        self.handles = send(self.flat if self.half is None else self.half.filled_from(self.flat), self.name)

    def has_arrived(self, poll: Callable[[Any], bool]) -> bool:
        """Tell whether `go_on` need not wait, which it never does."""
        return True

    def go_on(self, send: Send, wait: Callable[[Any], object]) -> int:
        """Start what follows the first sum, and return its bytes: nothing."""
        return 0

    def finish(self, send: Send, wait: Callable[[Any], object]) -> int:
        """Return when `flat` holds what all ranks' sum is, and the bytes that had to be sent for it once more."""
        for handle in self.handles:
            wait(handle)
        if self.half is None:
            return 0
        if self.half.misfitted():
            for handle in send(self.flat, f"{self.name}.again"):
                wait(handle)
            self.half.unscale(self.flat)
            return self.flat.nbytes
        self.flat.copy_(self.half.values)
        self.half.unscale(self.flat)
        return 0

    def witness(self) -> Tensor:
        """Return a number that is not finite where an entry of the average is not."""
        # A sum costs one pass; halves that fitted need none: every rank's largest exponent has been seen.
        return torch.zeros(()) if self.half is not None and self.half.fitted else self.flat.sum()


def runs_of(named: Sequence[tuple[str, nn.Parameter]], slots: Sequence[int], *, bucket_bytes: int) -> list[list[int]]:
    """Return runs of `slots` of one type and about `bucket_bytes`, the last first; it depends on the parameters alone.

    A larger parameter has a run of its own.
    """
    groups: list[list[int]] = []
    filled, kind = bucket_bytes, None
    for slot in reversed(slots):
        parameter = named[slot][1]
        if filled + parameter.nbytes > bucket_bytes or parameter.dtype != kind:
            groups.append([])
            filled, kind = 0, parameter.dtype
        groups[-1].append(slot)
        filled += parameter.nbytes
    return groups


def lay_out_buckets(
    named: Sequence[tuple[str, nn.Parameter]],
    slots: Sequence[int],
    *,
    size: int,
    bucket_bytes: int,
    half: Callable[[int, list[str]], HalfCopy] | None,
) -> list[Bucket]:
    """Return the buckets of the parameters at `slots`, as `runs_of` divides them."""
    buckets = []
    for number, group in enumerate(runs_of(named, slots, bucket_bytes=bucket_bytes)):
        parameters = [named[slot][1] for slot in group]
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        views, offset = [], 0
        for parameter in parameters:
            # The parameter's own strides: a channels_last weight keeps its format in the flat buffer.
            views.append(flat.as_strided(parameter.size(), parameter.stride(), offset))
            offset += parameter.numel()
        copy = half(flat.numel(), [named[slot][0] for slot in group]) if half else None
        buckets.append(Bucket(f"gradients.{number}", group, flat, views, copy, size))
    return buckets


def check_types(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise UsageError for a parameter whose gradients cannot be exchanged."""
    for name, parameter in named:
        if parameter.dtype not in TYPES:
            raise UsageError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}; gradients of float32 and float64 "
                "parameters can be averaged over ranks: keep the parameters in float32 and compute under autocast"
            )
