"""Averages the suffix's gradients over ranks while the backward pass still runs.

Parameters are laid out, last first, in a few buckets; a hook copies each gradient, divided by the number of ranks, into
its bucket as soon as it is ready, and a full bucket starts to be summed. Buckets, their order and names depend on the
cut alone, so sums are the same bits in every run. The gradient then *is* the bucket's slice: nothing is copied back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvfreeze.comm.gradient_exchange import Bucket, GradientExchange, Scaling, check_types, lay_out
from hvfreeze.comm.low_rank import check_arithmetic
from hvfreeze.comm.mpi_environment import TCP_MESSAGE_BYTES
from hvfreeze.comm.world import World
from hvfreeze.config.rules import parse_compression
from hvfreeze.errors import DivergedError, UsageError

SIGNAL_BYTES = 32
"""That a rank hands over in a step."""


@dataclass(frozen=True)
class Signals:
    """What all ranks learn in a step, summed over ranks."""

    nonfinite: int
    leave: int


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
    With one rank it leaves gradients alone and only shows them to the observer. For scripts, which call none of these,
    see `ScriptReducer`.
    """

    starts_itself: ClassVar[bool] = False
    """Whether a step's first gradient begins the exchange, and parameters may be switched on and off between steps."""
    step_is_between: ClassVar[tuple[str, str]] = ("begin() and finish() of the reducer", "begin(passes=N)")
    """Where a step's backward passes belong, and how to ask for N of them; for messages."""
    world: World
    compression: str = "none"
    """none; fp16: half the bytes, 11 bits of each value; powersgd:R: matrices of rank R; auto: none, until `compress`
    names another. See `gradient_exchange`."""
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
    title: str = ""
    """Begins the names of what travels, so that several reducers may be under way at once."""
    observer: Observer | None = None
    """Called with (index among the carried parameters, this rank's own gradient) before it is averaged."""
    on_wait: Callable[[], None] | None = None
    """Called in `finish` before it waits for other ranks: all of this rank's own gradients have been observed."""
    on_average: Callable[[], None] | None = None
    """Called at the end of `finish`: gradients are averages then."""
    carried: Sequence[tuple[str, nn.Parameter]] = ()
    """The parameters whose gradients are exchanged, with their names."""
    steps: int = 0
    """Whose gradients were exchanged so far."""
    _exchange: GradientExchange = field(init=False)
    _checked: bool = False
    """Whether ranks are known to compute alike what is laid out."""
    _trains: list[bool] = field(default_factory=list)
    """Of each carried parameter, whether it was trainable when the buckets were laid out."""
    _hooks: list[Any] = field(default_factory=list)
    _passes: int = 0
    """Backward passes that a parameter must see; 0 between `finish` and `begin`."""
    _seen: list[int] = field(default_factory=list)
    _exponents: dict[str, int] = field(default_factory=dict)
    _owed: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What low rank has left out of gradients that now travel whole: this rank's `error`, as matrices, by parameter."""
    _set_hash: int = 0
    """Below 2^24; depends on the carried parameters' names and their order."""
    _signals: Tensor | None = None
    _handle: Any = None
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._exchange = GradientExchange(self.world, piece_bytes=self.piece_bytes)

    def carry(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Exchange the gradients of exactly these parameters, of float32 or float64 where they train, from now on."""
        check_types([(name, parameter) for name, parameter in named_parameters if parameter.requires_grad])
        parse_compression(self.compression)
        for hook in self._hooks:
            hook.remove()
        for _, parameter in self.carried:
            parameter.grad = None
        self.carried = [*named_parameters]
        self._exponents = {name: self._exponents[name] for name, _ in self.carried if name in self._exponents}
        self._lay_out()
        self._passes, self._seen = 0, [0] * len(self.carried)
        self._hooks = [hook_on(parameter, self._ready_hook(slot)) for slot, (_, parameter) in enumerate(self.carried)]

    def begin(self, *, passes: int | None = None) -> None:
        """Drop the last step's gradients and get ready for this step's, of `passes` backward passes. Collective.

        Raises:
            UsageError: ranks compute different bits, and powersgd needs that they do not; on all ranks.
        """
        self._make_ready()
        if self.steps == self.uncompressed_steps and self.compression.startswith("powersgd"):
            self._lay_out()
        if self._exchange.low_rank and not self._checked:
            check_arithmetic(self._exchange.low_rank, self.world, compression=self.compression)
        self._checked = True
        self._exchange.begin()
        self._passes = self.backward_passes_per_step if passes is None else passes
        self._seen = [0] * len(self.carried)
        self._signals = None

    def signal(self, *, nonfinite: bool = False, leave: bool = False) -> None:
        """Start the exchange of this step's signals; without this call, the last backward pass does, with none set.

        Collective, between `begin` and the last backward pass.

        Args:
            nonfinite: the loss of one of this rank's passes is NaN or infinite.
            leave: this rank was asked to leave after this step.
        """
        self._since = time.perf_counter()
        values = [int(nonfinite), int(leave), self._set_hash, self._set_hash**2]
        self._signals = torch.tensor(values, dtype=torch.int64)
        self._handle = self.world.start_allreduce_(self._signals, name=f"{self.title}step.signals")
        self.other_bytes += SIGNAL_BYTES if self.world.size > 1 else 0

    def finish(self) -> Signals:
        """Wait until every gradient is the average over ranks; return what the ranks signalled. Collective.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
            UsageError: there were fewer backward passes than `begin` was told, or gradients were changed meanwhile.
        """
        assert self._passes, "finish() without begin()"
        if self._signals is None:
            self.signal()
        assert self._signals is not None
        if self.on_wait is not None:
            self.on_wait()
        self.world.wait(self._handle)
        nonfinite, leave, total, squares = self._signals.tolist()
        # Equality in Cauchy-Schwarz: n * sum(h^2) = (sum h)^2 only where all h are equal.
        if self.world.size * squares != total**2:
            raise DivergedError(
                "ranks disagree on which parameters are frozen; freeze and thaw through the Freezer, on all ranks"
            )
        self._complete_absent()
        self._start_full()
        self.payload_bytes += self._exchange.finish(self._check_untouched)
        self._finish_others()
        self._passes = 0
        sent = {name for (name, _), trains in zip(self.carried, self._trains, strict=True) if trains}
        self._owed = {name: kept for name, kept in self._owed.items() if name not in sent}
        self.steps += 1
        if self.on_average is not None:
            self.on_average()
        return Signals(nonfinite=nonfinite, leave=leave)

    def average_of(self, gradient: Tensor) -> Tensor:
        """Return the average over ranks, dense, for what `finish` has left in a parameter's gradient."""
        return gradient.to_dense() if gradient.is_sparse else gradient

    @property
    def passes(self) -> int:
        """Backward passes of the step under way; between steps, those that a step has by default."""
        return self._passes or self.backward_passes_per_step

    @property
    def exchanging(self) -> bool:
        """Whether gradients of a step are on their way, or `begin` waits for them."""
        return self._passes > 0

    def compress(self, compression: str) -> None:
        """Exchange by another compression from the next step on. Collective, between steps.

        What low rank has left out so far is kept for another low rank, and where a parameter's gradient now travels
        whole, added to the next one.
        """
        parse_compression(compression)
        self.compression = compression
        self._lay_out()

    def gradients_are_finite(self) -> bool:
        """Tell whether the (averaged) gradients hold neither NaN nor infinity; equal on all ranks after `finish`."""
        # A sum costs one pass and is not finite when an entry is not.
        found = [bucket.witness() for bucket in self._exchange.buckets]
        found = found or [p.grad.sum() for _, p in self.carried if p.grad is not None]
        return bool(torch.isfinite(torch.stack(found).sum())) if found else True

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's next exchange depends on besides its gradients; with powersgd as large as those."""
        return {
            "steps": self.steps,
            "exponents": dict(self._exponents),
            "low_rank": self._exchange.state_dict(),
            "owed": {name: {"error": kept["error"].clone()} for name, kept in self._owed.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; call it when the same parameters are carried."""
        self.steps = state["steps"]
        self._exponents = dict(state["exponents"])
        self._lay_out()
        self._exchange.load_state_dict(state["low_rank"])
        # Gradients that travel whole here, though there they did not, get what low rank has left out, as in `compress`.
        low_rank = self._exchange.state_dict().keys()
        whole = {name for name, _ in self.carried if name not in low_rank}
        left_out = {name: kept for name, kept in state["low_rank"].items() if name in whole}
        # Checkpoints of earlier versions have none.
        owed = {**state.get("owed", {}), **left_out}
        self._owed = {name: {"error": kept["error"].clone()} for name, kept in owed.items()}

    def _make_ready(self) -> None:
        """Get parameters and buckets ready for a step."""
        for _, parameter in self.carried:
            parameter.grad = None

    def _lay_out(self) -> None:
        kept, self._checked = self._kept_by_low_rank(), False
        self._trains = [parameter.requires_grad for _, parameter in self.carried]
        slots = [slot for slot, trains in enumerate(self._trains) if trains]
        names = "\n".join(self.carried[slot][0] for slot in slots)
        self._set_hash = int.from_bytes(hashlib.sha256(names.encode()).digest()[:3], "big")
        waits = self.compression.startswith("powersgd") and self.steps < self.uncompressed_steps
        compression, size = "none" if waits else self.compression, self.world.size
        scales, slots = self._scales(compression), [slot for slot in slots if self._fills_bucket(slot)]
        buckets = lay_out(
            [self.carried[slot] for slot in slots] if size > 1 else [],
            slots,
            compression=compression,
            rank=self.world.rank,
            size=size,
            bucket_bytes=self.bucket_bytes,
            exponents=self._exponents,
            title=self.title,
            before=scales.before,
        )
        self._exchange = GradientExchange(self.world, buckets, piece_bytes=self.piece_bytes, after=scales.after)
        self._exchange.load_state_dict(kept)
        again, carried = self._exchange.state_dict(), {name for name, _ in self.carried} if buckets else set()
        owed = carried - again.keys()
        self._owed = {name: of for name, of in {**self._owed, **kept}.items() if name in owed}

    def _kept_by_low_rank(self) -> dict[str, dict[str, Tensor]]:
        """Return by parameter what low rank keeps from step to step."""
        return self._exchange.state_dict()

    def _scales(self, compression: str) -> Scaling:
        """Return what gradients are multiplied by before they are summed, and their sums."""
        return Scaling.mean(self.world.size)

    def _fills_bucket(self, slot: int) -> bool:
        """Return True if a parameter's gradient travels in a bucket."""
        return True

    def _with_owed(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient with what low rank has left out of those before, where it travels whole again."""
        name, parameter = self.carried[slot]
        if name not in self._owed:
            return gradient
        owed = self._owed[name]["error"].as_strided(parameter.size(), parameter.stride())
        return owed if gradient is None else gradient + owed

    def _ready_hook(self, slot: int) -> Callable[[nn.Parameter], None]:
        def ready(parameter: nn.Parameter) -> None:
            self._enter_pass()
            if self._seen[slot] >= self._passes:
                where, way = self.step_is_between
                raise UsageError(
                    f"backward pass {self._seen[slot] + 1} where {self._passes} may be between {where}: give {way} to "
                    "add up the gradients of N, and take all of them in between"
                )
            if not self._trains[slot]:
                raise UsageError(
                    f"requires_grad of {self.carried[slot][0]} was switched on when gradients of the same step were on "
                    "their way already: switch it before the step's first backward pass"
                )
            self._seen[slot] += 1
            if self._seen[slot] == self._passes:
                self._complete(slot, parameter)
                self._start_full()

        return ready

    def _enter_pass(self) -> None:
        """Notice that a backward pass has a gradient ready."""

    def _complete(self, slot: int, parameter: nn.Parameter) -> None:
        """Show this rank's own gradient of a step to the observer, and copy it into its bucket."""
        if self._signals is None:
            self.signal()
        gradient = parameter.grad
        assert gradient is not None
        self.ready_seconds[self.carried[slot][0]] = time.perf_counter() - self._since
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if self.observer is not None:
            self.observer(slot, dense)
        if self.world.size > 1 and self._fills_bucket(slot):
            parameter.grad = self._exchange.copy_in(slot, self._with_owed(slot, dense))

    def _check_untouched(self, bucket: Bucket) -> None:
        """Raise UsageError where gradients were changed on their way."""

    def _check_passes(self, most: int) -> None:
        """Raise UsageError where there were fewer backward passes, at `most`, than were to come."""
        if 0 < most < self._passes:
            raise UsageError(f"finish() after {most} of {self._passes} backward passes that begin() was told")

    def _absent(self, parameter: nn.Parameter) -> Tensor | None:
        """Return, dense, what a parameter counts with that no backward pass has reached."""
        return None

    def _complete_absent(self) -> None:
        """Let a parameter that took no part in this rank's loss, or in some passes only, count with what it has."""
        self._check_passes(max(self._seen, default=0))
        for slot, (_, parameter) in enumerate(self.carried):
            if 0 < self._seen[slot] < self._passes:
                self._complete(slot, parameter)
            elif self._seen[slot] == 0 and self._trains[slot] and self.world.size > 1 and self._fills_bucket(slot):
                parameter.grad = self._exchange.copy_in(slot, self._with_owed(slot, self._absent(parameter)))

    def _finish_others(self) -> None:
        """Average the gradients that fill no bucket. Collective."""

    def _start_full(self) -> None:
        payload, tail = self._exchange.start_full()
        self.payload_bytes += payload
        self.other_bytes += tail


def hook_on(parameter: nn.Parameter, ready: Callable[[nn.Parameter], None]) -> Any:
    """Let `ready` be called when a gradient of `parameter` is there, also one that is not trainable now."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # only then PyTorch takes a hook, and it keeps it
    hook = parameter.register_post_accumulate_grad_hook(ready)
    parameter.requires_grad_(trains)
    return hook
