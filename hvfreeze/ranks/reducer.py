"""Averages the suffix's gradients over ranks while the backward pass still runs.

Parameters are laid out, last first, in a few flat buckets; a hook copies each gradient, divided by the number of
ranks, into its bucket as soon as it is ready, and a full bucket starts on its way to be summed. Buckets, their order
and names depend on the cut alone, so sums are the same bits in every run. The gradient then *is* the bucket's slice:
nothing is copied back.
Only the parameters that the reducer was told to carry travel; the frozen prefix costs no byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.errors import DivergedError, UsageError
from hvfreeze.ranks.exchange.buckets import Bucket, check_types, lay_out
from hvfreeze.ranks.exchange.halves import HalfCopy
from hvfreeze.ranks.machine.mpi_environment import TCP_MESSAGE_BYTES
from hvfreeze.ranks.world import World

BUCKET_BYTES = 4 * 2**20
# Two ranks exchange a piece in halves, and MPI adds a header to a message.
PIECE_BYTES = 2 * (TCP_MESSAGE_BYTES - 2**10)
"""A larger bucket, which holds one parameter, travels in pieces whose messages are sent without asking."""
HASH_BITS = 24

Observer = Callable[[int, Tensor], None]


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
    """none, or fp16: half the bytes, 11 bits of each value; see `hvfreeze.ranks.exchange`."""
    backward_passes_per_step: int = 1
    """Backward passes between `begin` and `finish`; their gradients are added up, as PyTorch does, and sent once."""
    bucket_bytes: int = BUCKET_BYTES
    piece_bytes: int = PIECE_BYTES
    payload_bytes: int = 0
    """Gradient bytes that this rank handed to Horovod so far."""
    other_bytes: int = 0
    observer: Observer | None = None
    """Called with (index among the carried parameters, this rank's own gradient) before it is averaged."""
    _named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    _buckets: list[Bucket] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)
    _place: list[tuple[Bucket, int]] = field(default_factory=list)
    _next: int = 0
    _passes: int = 0
    """Backward passes that a parameter must see; 0 between `finish` and `begin`."""
    _seen: list[int] = field(default_factory=list)
    _exponents: dict[str, int] = field(default_factory=dict)
    _set_hash: int = 0
    _header: Tensor | None = None
    _header_handle: Any = None

    def carry(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Exchange the gradients of exactly these parameters from now on.

        Raises:
            UsageError: a parameter is neither float32 nor float64.
        """
        check_types(named_parameters)
        for hook in self._hooks:
            hook.remove()
        for _, parameter in self._named:
            parameter.grad = None
        self._named = list(named_parameters)
        self._set_hash = hash_of_names([name for name, _ in self._named])
        self._exponents = {name: self._exponents[name] for name, _ in self._named if name in self._exponents}
        self._lay_out()
        self._passes, self._seen = 0, [0] * len(self._named)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready_hook(slot))
            for slot, (_, parameter) in enumerate(self._named)
        ]

    def begin(self, *, nonfinite: bool = False, leave: bool = False, passes: int | None = None) -> None:
        """Drop the last step's gradients and start the exchange of this step's signals.

        Collective: every rank of `world` must call this, once before a step's backward passes.

        Args:
            nonfinite: this rank's loss is NaN or infinite.
            leave: this rank was asked to leave after this step.
            passes: backward passes of this step, where they are not `backward_passes_per_step`.
        """
        for _, parameter in self._named:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.begin(size=self.world.size)
        self._next = 0
        self._passes = self.backward_passes_per_step if passes is None else passes
        self._seen = [0] * len(self._named)
        header = [int(nonfinite), int(leave), self._set_hash, self._set_hash**2]
        self._header = torch.tensor(header, dtype=torch.int64)
        self._header_handle = self.world.start_allreduce_(self._header, name="step.signals")
        self.other_bytes += 8 * len(header) if self.world.size > 1 else 0

    def finish(self) -> Signals:
        """Wait until every gradient is the average over ranks; return what the ranks signalled.

        Collective: every rank of `world` must call this, once after each step's backward passes.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
            UsageError: there were fewer backward passes than `begin` was told.
        """
        assert self._header is not None, "finish() without begin()"
        self.world.wait(self._header_handle)
        nonfinite, leave, total, squares = self._header.tolist()
        # Equality in Cauchy-Schwarz: n * sum(h^2) = (sum h)^2 only where all h are equal.
        if self.world.size * squares != total**2:
            raise DivergedError(
                "ranks disagree on which parameters are frozen; freeze and thaw through the Freezer, on all ranks"
            )
        self._complete_absent()
        self._start_full_buckets()
        for bucket in self._buckets:
            self.payload_bytes += bucket.finish(self._send, self.world.wait)
        self._passes = 0
        return Signals(nonfinite=nonfinite, leave=leave)

    def gradients_are_finite(self) -> bool:
        """Tell whether the (averaged) gradients hold neither NaN nor infinity; equal on all ranks after `finish`."""
        flats = [bucket.flat for bucket in self._buckets]
        tensors = flats or [p.grad for _, p in self._named if p.grad is not None]
        # A sum costs one pass and is not finite when an entry is not.
        return bool(torch.isfinite(torch.stack([tensor.sum() for tensor in tensors]).sum())) if tensors else True

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step's exchange depends on besides the gradients; equal on all ranks."""
        return {"exponents": dict(self._exponents)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; call it when the same parameters are carried."""
        self._exponents.clear()
        self._exponents.update(state["exponents"])

    def _lay_out(self) -> None:
        self._buckets, self._place = [], []
        if self.world.size > 1:
            slots = range(len(self._named))
            self._buckets = lay_out(self._named, slots, bucket_bytes=self.bucket_bytes, half=self._half_copy)
            places = {slot: (bucket, i) for bucket in self._buckets for i, slot in enumerate(bucket.slots)}
            self._place = [places[slot] for slot in slots]

    def _half_copy(self, flat: Tensor, names: list[str]) -> HalfCopy | None:
        if self.compression != "fp16":
            return None
        return HalfCopy(flat.numel(), names, rank=self.world.rank, size=self.world.size, exponents=self._exponents)

    def _ready_hook(self, slot: int) -> Callable[[nn.Parameter], None]:
        def ready(parameter: nn.Parameter) -> None:
            if self._seen[slot] >= self._passes:
                raise UsageError(
                    f"backward pass {self._seen[slot] + 1} where {self._passes} may be between begin() and finish() of "
                    "the reducer: give begin(passes=N) to add up the gradients of N, and take all of them in between"
                )
            self._seen[slot] += 1
            if self._seen[slot] == self._passes:
                self._complete(slot, parameter)
                self._start_full_buckets()

        return ready

    def _complete(self, slot: int, parameter: nn.Parameter) -> None:
        """Show and lay down this rank's own gradient of a step."""
        gradient = parameter.grad
        assert gradient is not None
        if self.observer is not None:
            self.observer(slot, gradient)
        if self._place:
            bucket, i = self._place[slot]
            torch.mul(gradient, bucket.scale, out=bucket.views[i])
            parameter.grad = bucket.views[i]
            bucket.missing -= 1

    def _complete_absent(self) -> None:
        """Let a parameter that took no part in this rank's loss, or in some passes only, count with what it has."""
        most = max(self._seen, default=0)
        if 0 < most < self._passes:
            raise UsageError(f"finish() after {most} of {self._passes} backward passes that begin() was told")
        for slot, (_, parameter) in enumerate(self._named):
            if 0 < self._seen[slot] < self._passes:
                self._complete(slot, parameter)
            elif self._seen[slot] == 0 and self._place:
                bucket, i = self._place[slot]
                parameter.grad = bucket.views[i].zero_()
                bucket.missing -= 1

    def _start_full_buckets(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            bucket.start(self._send)
            self.payload_bytes += bucket.payload_bytes
            self.other_bytes += 0 if bucket.half is None else bucket.half.tail_bytes
            self._next += 1

    def _send(self, wire: Tensor, name: str) -> list[Any]:
        pieces = wire.split(self.piece_bytes // wire.element_size())
        return [self.world.start_allreduce_(piece, name=f"{name}.{place}") for place, piece in enumerate(pieces)]


def hash_of_names(names: Sequence[str]) -> int:
    """Return a non-negative number below 2^24 that depends on the names and their order."""
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")
