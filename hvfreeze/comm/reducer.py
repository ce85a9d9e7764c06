"""Averages gradients over ranks during the backward pass.

Parameters are assigned to buckets, last parameter first. A hook copies each gradient, divided by the number of ranks,
into its bucket as soon as it is ready, and a full bucket is allreduced at once. Buckets, their order and names depend
only on the cut, so sums have the same bits in every run. Afterwards the gradient *is* the slice of the bucket; nothing
is copied back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvfreeze.comm.gradient_exchange import Bucket, GradientExchange, Scaling, check_types, lay_out
from hvfreeze.comm.low_rank import check_arithmetic
from hvfreeze.comm.mpi_environment import TCP_MESSAGE_BYTES
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import parse_compression
from hvfreeze.errors import DivergedError, UsageError


@dataclass(frozen=True)
class Signals:
    """Signals that all ranks get in a step, summed over ranks."""

    nonfinite: int
    leave: int


BUCKET_BYTES = 4 * 2**20
"""Target bytes of a bucket. A larger parameter is alone in its bucket."""
# Two ranks exchange a piece in halves, and MPI adds a header to a message.
PIECE_BYTES = 2 * (TCP_MESSAGE_BYTES - 2**10)
"""Largest message: its halves are sent eagerly."""
UNCOMPRESSED_STEPS = 10
"""Uncompressed steps before PowerSGD begins, because the first gradients are large and change quickly."""

Observer = Callable[[int, Tensor], None]


@dataclass
class Reducer:
    """Averages gradients over the ranks of `world`.

    Call `carry(parameters)` once and after every change of the cut. In each step call `begin()`, run the backward
    passes, and call `finish()`; to send signals, call `signal()` before the last backward pass. With one rank the
    gradients stay unchanged and only the observer sees them. `ScriptReducer` is for scripts, which call none of these.
    """

    starts_itself: ClassVar[bool] = False
    """True if the first gradient of a step starts the exchange, and requires_grad may change between steps."""
    step_is_between: ClassVar[tuple[str, str]] = ("begin() and finish() of the reducer", "begin(passes=N)")
    """For messages: the calls between which backward passes must run, and how to ask for N of them."""
    world: World
    compression: str = "none"
    """none; fp16: half the bytes, 11 bits per value; powersgd:R: matrices of rank R; auto: none until `compress`
    chooses. See `gradient_exchange`."""
    uncompressed_steps: int = field(default_factory=lambda: UNCOMPRESSED_STEPS)
    """Steps before PowerSGD begins."""
    backward_passes_per_step: int = 1
    """Backward passes between `begin` and `finish`; gradients are accumulated and exchanged once."""
    bucket_bytes: int = BUCKET_BYTES
    piece_bytes: int = PIECE_BYTES
    payload_bytes: int = 0
    """Gradient bytes that this rank has passed to Horovod so far."""
    other_bytes: int = 0
    title: str = ""
    """Prefix of message names, so that several reducers can be active at once."""
    observer: Observer | None = None
    """Called with (index of the carried parameter, this rank's gradient) before the gradient is averaged."""
    on_wait: Callable[[], None] | None = None
    """Called in `finish` before it waits for other ranks, after the observer has seen all gradients."""
    on_average: Callable[[], None] | None = None
    """Called at the end of `finish`, when gradients are averages."""
    carried: Sequence[tuple[str, nn.Parameter]] = ()
    """The parameters whose gradients are exchanged, with their names."""
    steps: int = 0
    """Steps whose gradients have been exchanged so far."""
    _exchange: GradientExchange = field(init=False)
    _checked: bool = False
    """True once ranks are known to compute equal bits for the current buckets."""
    _trains: list[bool] = field(default_factory=list)
    """For each carried parameter, whether it was trainable when the buckets were created."""
    _hooks: list[Any] = field(default_factory=list)
    _passes: int = 0
    """Backward passes that each parameter must take part in; 0 between `finish` and `begin`."""
    _seen: list[int] = field(default_factory=list)
    _exponents: dict[str, int] = field(default_factory=dict)
    _residuals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """This rank's error-feedback residuals (`error`, as matrices) of parameters that are no longer compressed."""
    _set_hash: int = 0
    """Hash of the names and order of the carried parameters, below 2^24."""
    _signals: Tensor | None = None
    _handle: Any = None

    def __post_init__(self) -> None:
        self._exchange = GradientExchange(self.world, piece_bytes=self.piece_bytes)

    def carry(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Exchange the gradients of exactly these parameters from now on; trainable ones must be float32 or float64.

        Parameters that are no longer carried lose their gradients.
        """
        check_types([(name, parameter) for name, parameter in named_parameters if parameter.requires_grad])
        parse_compression(self.compression)
        for hook in self._hooks:
            hook.remove()
        kept = {parameter for _, parameter in named_parameters}
        for _, parameter in self.carried:
            if parameter not in kept:
                parameter.grad = None
        self.carried = [*named_parameters]
        self._exponents = {name: self._exponents[name] for name, _ in self.carried if name in self._exponents}
        self._lay_out()
        self._passes, self._seen = 0, [0] * len(self.carried)
        self._hooks = [hook_on(parameter, self._ready_hook(slot)) for slot, (_, parameter) in enumerate(self.carried)]

    def begin(self, *, passes: int | None = None) -> None:
        """Drop the last step's gradients and start a step of `passes` backward passes. Collective.

        Raises:
            UsageError: ranks compute different bits, which PowerSGD does not allow; on all ranks.
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
        """Start the exchange of this step's signals; without this call, the last backward pass sends empty ones.

        Collective, between `begin` and the last backward pass.

        Args:
            nonfinite: the loss of a backward pass of this rank is NaN or Inf.
            leave: this rank was asked to leave after this step.
        """
        values = [int(nonfinite), int(leave), self._set_hash, self._set_hash**2]
        self._signals = torch.tensor(values, dtype=torch.int64)
        self._handle = self.world.start_allreduce_(self._signals, name=f"{self.title}step.signals")
        self.other_bytes += self._signals.nbytes if self.world.size > 1 else 0

    def finish(self) -> Signals:
        """Wait until every gradient is the average over ranks; return the signals of all ranks. Collective.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
            UsageError: there were fewer backward passes than announced by `begin`, or gradients were changed meanwhile.
        """
        assert self._passes, "finish() must follow begin()"
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
        self._residuals = {name: kept for name, kept in self._residuals.items() if name not in sent}
        self.steps += 1
        if self.on_average is not None:
            self.on_average()
        return Signals(nonfinite=nonfinite, leave=leave)

    def average_of(self, gradient: Tensor) -> Tensor:
        """Return a parameter's averaged gradient after `finish`, as a dense tensor."""
        return gradient.to_dense() if gradient.is_sparse else gradient

    @property
    def passes(self) -> int:
        """Backward passes of the current step; between steps, the default number."""
        return self._passes or self.backward_passes_per_step

    @property
    def exchanging(self) -> bool:
        """True while gradients are being exchanged, or `begin` waits for them."""
        return self._passes > 0

    def compress(self, compression: str) -> None:
        """Use another compression from the next step on. Collective, between steps.

        Error-feedback residuals are kept for another low rank. If a parameter is no longer compressed, its residual is
        added to its next gradient.
        """
        parse_compression(compression)
        self.compression = compression
        self._lay_out()

    def gradients_are_finite(self) -> bool:
        """Return True if the averaged gradients contain neither NaN nor Inf; equal on all ranks after `finish`."""
        # A sum costs one pass and is not finite when an entry is not.
        found = [bucket.witness() for bucket in self._exchange.buckets]
        found = found or [p.grad.sum() for _, p in self.carried if p.grad is not None]
        return bool(torch.isfinite(torch.stack(found).sum())) if found else True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the exchange apart from gradients; with PowerSGD it is as large as the gradients."""
        return {
            "steps": self.steps,
            "exponents": dict(self._exponents),
            "low_rank": self._exchange.state_dict(),
            "owed": {name: {"error": kept["error"].clone()} for name, kept in self._residuals.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; the same parameters must be carried."""
        self.steps = state["steps"]
        self._exponents = dict(state["exponents"])
        self._lay_out()
        self._exchange.load_state_dict(state["low_rank"])
        # Gradients that were compressed in the saved run but are whole here get their residual, as in `compress`.
        low_rank = self._exchange.state_dict().keys()
        whole = {name for name, _ in self.carried if name not in low_rank}
        left_out = {name: kept for name, kept in state["low_rank"].items() if name in whole}
        # Checkpoints of earlier versions have none.
        owed = {**state.get("owed", {}), **left_out}
        self._residuals = {name: {"error": kept["error"].clone()} for name, kept in owed.items()}

    def _make_ready(self) -> None:
        """Prepare parameters and buckets for a step."""
        for _, parameter in self.carried:
            parameter.grad = None

    def _lay_out(self) -> None:
        kept, self._checked = self._low_rank_state(), False
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
        self._residuals = {name: of for name, of in {**self._residuals, **kept}.items() if name in owed}

    def _low_rank_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that low rank keeps between steps, by parameter."""
        return self._exchange.state_dict()

    def _scales(self, compression: str) -> Scaling:
        """Return the factors for gradients before they are summed, and for their sums."""
        return Scaling.mean(self.world.size)

    def _fills_bucket(self, slot: int) -> bool:
        """Return True if a parameter's gradient is exchanged in a bucket."""
        return True

    def _add_residual(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient plus its error-feedback residual, if it is no longer compressed."""
        name, parameter = self.carried[slot]
        if name not in self._residuals:
            return gradient
        owed = self._residuals[name]["error"].as_strided(parameter.size(), parameter.stride())
        return owed if gradient is None else gradient + owed

    def _ready_hook(self, slot: int) -> Callable[[nn.Parameter], None]:
        def ready(parameter: nn.Parameter) -> None:
            self._enter_pass()
            if self._seen[slot] >= self._passes:
                where, way = self.step_is_between
                raise UsageError(
                    f"this is backward pass {self._seen[slot] + 1}, but only {self._passes} may run between {where}; "
                    f"to accumulate gradients over N passes, use {way} and run all N in between"
                )
            if not self._trains[slot]:
                raise UsageError(
                    f"requires_grad of {self.carried[slot][0]} was switched on after the exchange of this step's "
                    "gradients had started; switch it before the first backward pass of a step"
                )
            self._seen[slot] += 1
            if self._seen[slot] == self._passes:
                self._complete(slot, parameter)
                self._start_full()

        return ready

    def _enter_pass(self) -> None:
        """Handle the first gradient of a backward pass; the base class does nothing."""

    def _complete(self, slot: int, parameter: nn.Parameter) -> None:
        """Pass this rank's gradient to the observer, and copy it into its bucket."""
        if self._signals is None:
            self.signal()
        gradient = parameter.grad
        assert gradient is not None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if self.observer is not None:
            self.observer(slot, dense)
        if self.world.size > 1 and self._fills_bucket(slot):
            parameter.grad = self._exchange.copy_in(slot, self._add_residual(slot, dense))

    def _check_untouched(self, bucket: Bucket) -> None:
        """Raise UsageError if gradients were changed during the exchange."""

    def _check_passes(self, most: int) -> None:
        """Raise UsageError if there were only `most` backward passes, fewer than announced."""
        if 0 < most < self._passes:
            raise UsageError(
                f"finish() was called after {most} of the {self._passes} backward passes that begin(passes=) announced"
            )

    def _absent(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the dense gradient to use for a parameter that no backward pass has reached."""
        return None

    def _complete_absent(self) -> None:
        """Complete parameters that did not take part in this rank's loss, or only in some of the passes."""
        self._check_passes(max(self._seen, default=0))
        for slot, (_, parameter) in enumerate(self.carried):
            if 0 < self._seen[slot] < self._passes:
                self._complete(slot, parameter)
            elif self._seen[slot] == 0 and self._trains[slot] and self.world.size > 1 and self._fills_bucket(slot):
                parameter.grad = self._exchange.copy_in(slot, self._add_residual(slot, self._absent(parameter)))

    def _finish_others(self) -> None:
        """Average the gradients that are in no bucket. Collective."""

    def _start_full(self) -> None:
        payload, tail = self._exchange.start_full()
        self.payload_bytes += payload
        self.other_bytes += tail


def hook_on(parameter: nn.Parameter, ready: Callable[[nn.Parameter], None]) -> Any:
    """Call `ready` when a gradient of `parameter` is ready, even if the parameter is not trainable now."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # only then PyTorch takes a hook, and it keeps it
    hook = parameter.register_post_accumulate_grad_hook(ready)
    parameter.requires_grad_(trains)
    return hook
