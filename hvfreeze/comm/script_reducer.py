"""Averages gradients for Horovod scripts, which do not announce when a step begins or which parameters train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvfreeze.comm.gradient_exchange import Bucket, Scaling, check_types, exchange_sparse
from hvfreeze.comm.reducer import Reducer, Signals
from hvfreeze.errors import UsageError


@dataclass
class ScriptReducer(Reducer):
    """A `Reducer` that starts the exchange with the first gradient of a step.

    It keeps all gradients, because scripts call `zero_grad` themselves, and `finish` accepts any number of backward
    passes. A parameter whose `requires_grad` is off when a step begins is not exchanged and keeps its gradient.
    """

    starts_itself: ClassVar[bool] = True
    step_is_between: ClassVar[tuple[str, str]] = ("two steps", "backward_passes_per_step=N")
    scaling: Scaling | None = None
    """Factors for gradients before and after the sum; None is the average."""
    sparse: frozenset[nn.Parameter] = frozenset()
    """Parameters whose sparse gradients are exchanged as rows; other sparse gradients are exchanged dense."""
    always: Sequence[tuple[str, nn.Parameter]] = ()
    """Parameters that are exchanged at every cut, after those of `carry`."""
    owner: Any = None
    """The optimizer of this reducer, kept alive as long as the hooks on its parameters, even if the script drops it."""
    _released: bool = False
    """True after another reducer has taken over these parameters."""
    _formats: list[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=list)
    """Type and strides of each carried parameter when the buckets were created."""
    _made_dense: dict[int, int] = field(default_factory=dict)
    """Slots whose sparse gradients are exchanged dense in this step, with their numbers of sparse dimensions."""
    _set_aside: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Low-rank state of parameters whose requires_grad is off."""

    def carry(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Exchange the gradients of these parameters and of `always` from now on."""
        super().carry([*named_parameters, *self.always])

    def finish(self) -> Signals:
        """Wait until every gradient is the average over ranks; return the signals of all ranks. Collective.

        Raises:
            DivergedError: the ranks carry different sets of parameters.
            UsageError: gradients were changed meanwhile, or another reducer has taken over these parameters.
        """
        if self._released:
            raise UsageError(
                "another DistributedOptimizer was created later with the same parameters and now averages their "
                "gradients; call step() of that one, or give each optimizer different parameters"
            )
        self._enter_pass()
        return super().finish()

    def average_of(self, gradient: Tensor) -> Tensor:
        """Return a parameter's averaged gradient after `finish`, as a dense tensor."""
        whole = super().average_of(gradient)
        factor = 1.0 if self.scaling is None else self.scaling.before * self.scaling.after * self.world.size
        return whole if factor == 1.0 else whole / factor

    def release(self) -> None:
        """Stop averaging: another reducer has taken over these parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._passes, self._released = [], 0, True

    def _enter_pass(self) -> None:
        if not self._passes:
            self.begin()

    def _make_ready(self) -> None:
        """Apply changes by the script of requires_grad, type and memory format."""
        parameters = [parameter for _, parameter in self.carried]
        if self._trains != [p.requires_grad for p in parameters] or self._formats != formats_of(parameters):
            check_types([(name, parameter) for name, parameter in self.carried if parameter.requires_grad])
            self._lay_out()

    def _lay_out(self) -> None:
        kept = self._low_rank_state()
        super()._lay_out()
        self._formats = formats_of([parameter for _, parameter in self.carried])
        off = {name for (name, _), trains in zip(self.carried, self._trains) if not trains}
        self._set_aside = {name: state for name, state in kept.items() if name in off}
        self._residuals = {name: of for name, of in self._residuals.items() if name not in self._set_aside}

    def _low_rank_state(self) -> dict[str, dict[str, Tensor]]:
        return {**self._set_aside, **super()._low_rank_state()}

    def _scales(self, compression: str) -> Scaling:
        size = self.world.size
        scales = self.scaling or Scaling.mean(size)
        return scales if compression == "none" else scales.compressed(size)

    def _fills_bucket(self, slot: int) -> bool:
        return self.carried[slot][1] not in self.sparse

    def _complete(self, slot: int, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and self.world.size > 1 and self._fills_bucket(slot):
            self._made_dense[slot] = gradient.sparse_dim()
        super()._complete(slot, parameter)

    def _check_passes(self, most: int) -> None:
        """Accept any number of backward passes."""

    def _absent(self, parameter: nn.Parameter) -> Tensor | None:
        own = parameter.grad
        return own.to_dense() if own is not None and own.is_sparse else own

    def _check_untouched(self, bucket: Bucket) -> None:
        if self._exchange.is_touched(bucket, [self.carried[slot][1].grad for slot in bucket.slots]):
            raise UsageError(
                "gradients were changed after backward() and before they were averaged over ranks, so the change "
                "is lost; call synchronize() before you clip or scale them, and step() inside skip_synchronize()"
            )

    def _finish_others(self) -> None:
        """Convert averaged gradients back to sparse ones when all others are done."""
        for slot, dimensions in self._made_dense.items():
            parameter = self.carried[slot][1]
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse(dimensions)
        self._made_dense = {}
        scaling = self.scaling or Scaling.mean(self.world.size)
        for slot, (name, parameter) in enumerate(self.carried if self.world.size > 1 else []):
            if self._trains[slot] and not self._fills_bucket(slot):
                called = f"{self.title}gradients.sparse.{name}"
                self.payload_bytes += exchange_sparse(parameter, self.world, scaling, name=called)


def formats_of(parameters: Sequence[nn.Parameter]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the type and the strides of each parameter."""
    return [(parameter.dtype, parameter.stride()) for parameter in parameters]
