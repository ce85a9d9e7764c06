"""Averages the suffix's gradients over ranks while the backward pass still runs.

Parameters are laid out, last first, in a few flat buckets; a hook copies each gradient, divided by the number of
ranks, into its bucket as soon as it is ready, and a full bucket starts on its way to be summed. Buckets, their order
and names depend on the cut alone, so sums are the same bits in every run. The gradient then *is* the bucket's slice:
nothing is copied back.
Only the parameters that the reducer was told to carry travel; the frozen prefix costs no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.machine.mpi_environment import TCP_MESSAGE_BYTES
from hvfreeze.ranks.world import World

BUCKET_BYTES = 4 * 2**20
# Two ranks exchange a piece in halves, and MPI adds a header to a message.
PIECE_BYTES = 2 * (TCP_MESSAGE_BYTES - 2**10)
"""A larger bucket, which holds one parameter, travels in pieces whose messages are sent without asking."""
HASH_BITS = 24

Observer = Callable[[int, Tensor], None]


@dataclass
class Bucket:
    """A run of parameters whose gradients travel together."""

    slots: list[int]
    flat: Tensor
    wire: Tensor
    """What is handed to Horovod: `flat` itself, or its float16 copy."""
    views: list[Tensor]
    missing: int = 0
    handles: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Signals:
    """What all ranks learn in a step, summed over ranks."""

    nonfinite: int
    leave: int


@dataclass
class Reducer:
    """Averages gradients over the ranks of `world`.

    Use: `carry(parameters)` once and after every change of the cut; in each step `begin()`, backward, `finish()`.
    With one rank it leaves gradients alone and only shows them to the observer.
    """

    world: World
    compression: str = "none"
    bucket_bytes: int = BUCKET_BYTES
    piece_bytes: int = PIECE_BYTES
    payload_bytes: int = 0
    """Gradient bytes that this rank handed to Horovod so far."""
    other_bytes: int = 0
    observer: Observer | None = None
    """Called with (index among the carried parameters, this rank's own gradient) before it is averaged."""
    _parameters: list[nn.Parameter] = field(default_factory=list)
    _buckets: list[Bucket] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)
    _place: list[tuple[Bucket, int]] = field(default_factory=list)
    _next: int = 0
    _set_hash: int = 0
    _header: Tensor | None = None
    _header_handle: Any = None

    def carry(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Exchange the gradients of exactly these parameters from now on."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters = [parameter for _, parameter in named_parameters]
        self._set_hash = hash_of_names([name for name, _ in named_parameters])
        self._buckets = self._lay_out() if self.world.size > 1 else []
        places = {slot: (bucket, i) for bucket in self._buckets for i, slot in enumerate(bucket.slots)}
        self._place = [places[slot] for slot in range(len(self._parameters))] if places else []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready_hook(slot))
            for slot, parameter in enumerate(self._parameters)
        ]

    def begin(self, *, nonfinite: bool = False, leave: bool = False) -> None:
        """Drop the last step's gradients and start the exchange of this step's signals.

        Collective: every rank of `world` must call this, once before each backward pass.

        Args:
            nonfinite: this rank's loss is NaN or infinite.
            leave: this rank was asked to leave after this step.
        """
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        self._next = 0
        header = [int(nonfinite), int(leave), self._set_hash, self._set_hash**2]
        self._header = torch.tensor(header, dtype=torch.int64)
        self._header_handle = self.world.start_allreduce_(self._header, name="step.signals")
        self.other_bytes += 8 * len(header) if self.world.size > 1 else 0

    def finish(self) -> Signals:
        """Wait until every gradient is the average over ranks; return what the ranks signalled.

        Collective: every rank of `world` must call this, once after each backward pass.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
        """
        assert self._header is not None, "finish() without begin()"
        self.world.wait(self._header_handle)
        nonfinite, leave, total, squares = self._header.tolist()
        # Equality in Cauchy-Schwarz: n * sum(h^2) = (sum h)^2 only where all h are equal.
        if self.world.size * squares != total**2:
            raise DivergedError(
                "ranks disagree on which parameters are frozen; freeze and thaw through the Freezer, on all ranks"
            )
        for bucket in self._buckets:
            self._fill_absent(bucket)
        self._start_full_buckets()
        for bucket in self._buckets:
            for handle in bucket.handles:
                self.world.wait(handle)
            if bucket.wire is not bucket.flat:
                bucket.flat.copy_(bucket.wire)
        return Signals(nonfinite=nonfinite, leave=leave)

    def gradients_are_finite(self) -> bool:
        """Tell whether the (averaged) gradients hold neither NaN nor infinity; equal on all ranks after `finish`."""
        flats = [bucket.flat for bucket in self._buckets]
        tensors = flats or [p.grad for p in self._parameters if p.grad is not None]
        # A sum costs one pass and is not finite when an entry is not.
        return bool(torch.isfinite(torch.stack([tensor.sum() for tensor in tensors]).sum())) if tensors else True

    def _lay_out(self) -> list[Bucket]:
        groups: list[list[int]] = []
        filled = self.bucket_bytes
        for slot in reversed(range(len(self._parameters))):
            size = self._parameters[slot].numel() * 4
            if filled + size > self.bucket_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(slot)
            filled += size
        return [self._bucket(slots) for slots in groups]

    def _bucket(self, slots: list[int]) -> Bucket:
        flat = torch.zeros(sum(self._parameters[slot].numel() for slot in slots))
        views, offset = [], 0
        for slot in slots:
            parameter = self._parameters[slot]
            # The parameter's own strides: a channels_last weight keeps its format in the flat buffer.
            views.append(flat.as_strided(parameter.size(), parameter.stride(), offset))
            offset += parameter.numel()
        wire = torch.zeros_like(flat, dtype=torch.float16) if self.compression == "fp16" else flat
        return Bucket(slots=slots, flat=flat, wire=wire, views=views)

    def _ready_hook(self, slot: int) -> Callable[[nn.Parameter], None]:
        def ready(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if self.observer is not None:
                self.observer(slot, gradient)
            if self._place:
                bucket, i = self._place[slot]
                # Scaled on the way, which costs nothing here, and before a sum of large halves could overflow.
                torch.mul(gradient, 1 / self.world.size, out=bucket.views[i])
                parameter.grad = bucket.views[i]
                bucket.missing -= 1
                self._start_full_buckets()

        return ready

    def _start_full_buckets(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            if bucket.wire is not bucket.flat:
                bucket.wire.copy_(bucket.flat)
            pieces = bucket.wire.split(self.piece_bytes // bucket.wire.element_size())
            bucket.handles = [
                self.world.start_allreduce_(piece, name=f"gradients.{self._next}.{place}")
                for place, piece in enumerate(pieces)
            ]
            self.payload_bytes += bucket.wire.numel() * bucket.wire.element_size()
            self._next += 1

    def _fill_absent(self, bucket: Bucket) -> None:
        """Let a parameter that took no part in this rank's loss count as a zero gradient."""
        if bucket.missing == 0:
            return
        for i, slot in enumerate(bucket.slots):
            if self._parameters[slot].grad is None:
                bucket.views[i].zero_()
                self._parameters[slot].grad = bucket.views[i]
        bucket.missing = 0


def hash_of_names(names: Sequence[str]) -> int:
    """Return a non-negative number below 2^24 that depends on the names and their order."""
    import hashlib

    digest = hashlib.sha256("\n".join(names).encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")
