"""Averages the suffix's gradients over ranks while the backward pass still runs.

Parameters are laid out, last first, in a few flat buckets; a hook copies each gradient, divided by the number of
ranks, into its bucket as soon as it is ready, and a full bucket starts on its way to be summed. Buckets, their order
and names depend on the cut alone, so sums are the same bits in every run. The gradient then *is* the bucket's slice:
nothing is copied back.
Only the parameters that the reducer was told to carry travel; the frozen prefix costs no byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.config.rules import parse_compression
from hvfreeze.errors import UsageError
from hvfreeze.ranks.exchange.buckets import check_types
from hvfreeze.ranks.exchange.convoy import Convoy, Parcel
from hvfreeze.ranks.exchange.layout import lay_out
from hvfreeze.ranks.exchange.low_rank.parcel import check_arithmetic
from hvfreeze.ranks.exchange.signals import SIGNAL_BYTES, Header, Signals, hash_of_names
from hvfreeze.ranks.machine.mpi_environment import TCP_MESSAGE_BYTES
from hvfreeze.ranks.world import World

BUCKET_BYTES = 4 * 2**20
# Two ranks exchange a piece in halves, and MPI adds a header to a message.
PIECE_BYTES = 2 * (TCP_MESSAGE_BYTES - 2**10)
"""A larger bucket, which holds one parameter, travels in pieces whose messages are sent without asking."""
UNCOMPRESSED_STEPS = 10
"""Before PowerSGD begins: the first gradients are large, and turn from step to step."""

Observer = Callable[[int, Tensor], None]


@dataclass
class Reducer:
    """Averages gradients over the ranks of `world`.

    Use: `carry(parameters)` once and after every change of the cut; in each step `begin()`, backward, `finish()`,
    and `signal()` before the last backward pass where there is something to tell.
    With one rank it leaves gradients alone and only shows them to the observer.
    """

    world: World
    compression: str = "none"
    """none; fp16: half the bytes, 11 bits of each value; powersgd:R: matrices of rank R; auto: none, until `compress`
    names another. See `ranks.exchange`."""
    uncompressed_steps: int = field(default_factory=lambda: UNCOMPRESSED_STEPS)
    """Steps before powersgd begins."""
    backward_passes_per_step: int = 1
    """Backward passes between `begin` and `finish`; their gradients are added up, as PyTorch does, and sent once."""
    bucket_bytes: int = BUCKET_BYTES
    piece_bytes: int = PIECE_BYTES
    ready_seconds: dict[str, float] = field(default_factory=dict)
    """From the begin of a step's last backward pass until a parameter's gradient was there; of the last step."""
    payload_bytes: int = 0
    """Gradient bytes that this rank handed to Horovod so far."""
    other_bytes: int = 0
    starts_itself: bool = False
    """Whether a step's first gradient begins the exchange, which then drops no gradients, and `finish` takes what came
    however many passes there were; for scripts that call `zero_grad` wherever they like."""
    always: Sequence[tuple[str, nn.Parameter]] = ()
    """Parameters that travel at every cut, behind those that `carry` is given."""
    observer: Observer | None = None
    """Called with (index among the carried parameters, this rank's own gradient) before it is averaged."""
    _named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    _convoy: Convoy = field(init=False)
    _checked: bool = False
    """Whether ranks are known to compute alike what is laid out."""
    _hooks: list[Any] = field(default_factory=list)
    _steps: int = 0
    _passes: int = 0
    """Backward passes that a parameter must see; 0 between `finish` and `begin`."""
    _seen: list[int] = field(default_factory=list)
    _exponents: dict[str, int] = field(default_factory=dict)
    _set_hash: int = 0
    _header: Header | None = None
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._convoy = Convoy(self.world, piece_bytes=self.piece_bytes)

    def carry(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Exchange the gradients of exactly these parameters from now on.

        Raises:
            UsageError: a parameter is neither float32 nor float64, or the compression is unknown.
        """
        check_types([*named_parameters, *self.always])
        parse_compression(self.compression)
        for hook in self._hooks:
            hook.remove()
        for _, parameter in self._named:
            parameter.grad = None
        self._named = [*named_parameters, *self.always]
        self._set_hash = hash_of_names([name for name, _ in self._named])
        self._exponents = {name: self._exponents[name] for name, _ in self._named if name in self._exponents}
        self._lay_out()
        self._passes, self._seen = 0, [0] * len(self._named)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready_hook(slot))
            for slot, (_, parameter) in enumerate(self._named)
        ]

    def begin(self, *, passes: int | None = None) -> None:
        """Drop the last step's gradients and get ready for this step's.

        Collective: every rank of `world` must call this, once before a step's backward passes.

        Args:
            passes: backward passes of this step, where they are not `backward_passes_per_step`.

        Raises:
            UsageError: ranks compute different bits, and powersgd needs that they do not; on all ranks.
        """
        if not self.starts_itself:
            for _, parameter in self._named:
                parameter.grad = None
        if self._steps == self.uncompressed_steps and self.compression.startswith("powersgd"):
            self._lay_out()
        if self._convoy.low_rank and not self._checked:
            check_arithmetic(self._convoy.low_rank, self.world, compression=self.compression)
        self._checked = True
        self._convoy.begin()
        self._passes = self.backward_passes_per_step if passes is None else passes
        self._seen = [0] * len(self._named)
        self._header = None

    def signal(self, *, nonfinite: bool = False, leave: bool = False) -> None:
        """Start the exchange of this step's signals; without this call, the last backward pass does, with none set.

        Collective: every rank of `world` may call this, between `begin` and the last backward pass.

        Args:
            nonfinite: the loss of one of this rank's passes is NaN or infinite.
            leave: this rank was asked to leave after this step.
        """
        self._since = time.perf_counter()
        self._header = Header(self.world, self._set_hash, nonfinite=nonfinite, leave=leave)
        self.other_bytes += SIGNAL_BYTES if self.world.size > 1 else 0

    def finish(self) -> Signals:
        """Wait until every gradient is the average over ranks; return what the ranks signalled.

        Collective: every rank of `world` must call this, once after each step's backward passes.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
            UsageError: there were fewer backward passes than `begin` was told, or gradients were changed meanwhile.
        """
        if self.starts_itself and not self._passes:
            self.begin()
        assert self._passes, "finish() without begin()"
        if self._header is None:
            self.signal()
        assert self._header is not None
        signals = self._header.wait()
        self._complete_absent()
        self._start_full_parcels()
        self.payload_bytes += self._convoy.finish(self._check_untouched)
        self._passes = 0
        self._steps += 1
        return signals

    @property
    def exchanging(self) -> bool:
        """Whether gradients of a step are on their way, or `begin` waits for them."""
        return self._passes > 0

    @property
    def steps(self) -> int:
        """Steps whose gradients were exchanged so far."""
        return self._steps

    @property
    def carried(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The parameters whose gradients are exchanged, with their names."""
        return self._named

    def compress(self, compression: str) -> None:
        """Exchange by another compression from the next step on; every rank of `world` must call this between steps.

        What low rank has left out so far is kept for another low rank only.
        """
        parse_compression(compression)
        self.compression = compression
        self._lay_out()

    def gradients_are_finite(self) -> bool:
        """Tell whether the (averaged) gradients hold neither NaN nor infinity; equal on all ranks after `finish`."""
        # A sum costs one pass and is not finite when an entry is not.
        found = [parcel.witness() for parcel in self._convoy.parcels]
        found = found or [p.grad.sum() for _, p in self._named if p.grad is not None]
        return bool(torch.isfinite(torch.stack(found).sum())) if found else True

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's next exchange depends on besides its gradients; with powersgd as large as those."""
        low_rank = self._convoy.state_dict()
        return {"steps": self._steps, "exponents": dict(self._exponents), "low_rank": low_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; call it when the same parameters are carried."""
        self._steps = state["steps"]
        self._exponents.clear()
        self._exponents.update(state["exponents"])
        self._lay_out()
        self._convoy.load_state_dict(state["low_rank"])

    def _lay_out(self) -> None:
        before, self._checked = self._convoy, False
        self._convoy = Convoy(self.world, piece_bytes=self.piece_bytes)
        if self.world.size == 1:
            return
        waits = self.compression.startswith("powersgd") and self._steps < self.uncompressed_steps
        low_rank, buckets = lay_out(
            self._named,
            compression="none" if waits else self.compression,
            world=self.world,
            bucket_bytes=self.bucket_bytes,
            exponents=self._exponents,
        )
        self._convoy = Convoy(self.world, piece_bytes=self.piece_bytes, low_rank=low_rank, buckets=buckets)
        self._convoy.load_state_dict(before.state_dict())

    def _ready_hook(self, slot: int) -> Callable[[nn.Parameter], None]:
        def ready(parameter: nn.Parameter) -> None:
            if self.starts_itself and not self._passes:
                self.begin()
            if self._seen[slot] >= self._passes:
                where, way = "begin() and finish() of the reducer", "begin(passes=N)"
                if self.starts_itself:
                    where, way = "two steps", "backward_passes_per_step=N"
                raise UsageError(
                    f"backward pass {self._seen[slot] + 1} where {self._passes} may be between {where}: give {way} to "
                    "add up the gradients of N, and take all of them in between"
                )
            self._seen[slot] += 1
            if self._seen[slot] == self._passes:
                self._complete(slot, parameter)
                self._start_full_parcels()

        return ready

    def _complete(self, slot: int, parameter: nn.Parameter) -> None:
        """Show and lay down this rank's own gradient of a step."""
        if self._header is None:
            self.signal()
        gradient = parameter.grad
        assert gradient is not None
        self.ready_seconds[self._named[slot][0]] = time.perf_counter() - self._since
        if self.observer is not None:
            self.observer(slot, gradient)
        if not self._convoy.is_empty:
            parameter.grad = self._convoy.lay_down(slot, gradient)

    def _check_untouched(self, parcel: Parcel) -> None:
        if self.starts_itself and parcel.flat._version != parcel.version:
            raise UsageError(
                "gradients were changed between backward() and their average over ranks, and it is lost: call "
                "synchronize() before they are clipped or scaled, and step() inside skip_synchronize()"
            )

    def _complete_absent(self) -> None:
        """Let a parameter that took no part in this rank's loss, or in some passes only, count with what it has."""
        most = max(self._seen, default=0)
        if 0 < most < self._passes and not self.starts_itself:
            raise UsageError(f"finish() after {most} of {self._passes} backward passes that begin() was told")
        for slot, (_, parameter) in enumerate(self._named):
            if 0 < self._seen[slot] < self._passes:
                self._complete(slot, parameter)
            elif self._seen[slot] == 0 and not self._convoy.is_empty:
                parameter.grad = self._convoy.lay_down(slot, parameter.grad if self.starts_itself else None)

    def _start_full_parcels(self) -> None:
        payload, tail = self._convoy.start_full()
        self.payload_bytes += payload
        self.other_bytes += tail
