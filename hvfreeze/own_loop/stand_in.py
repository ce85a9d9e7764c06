"""An optimizer that stands in for another one, to schedulers, checkpoints and everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvfreeze.errors import UsageError
from hvfreeze.freezing.frozen import prune_optimizer


class StandIn(torch.optim.Optimizer):
    """Has the groups, state and state_dict of the optimizer that it stands for; that of frozen parameters is gone."""

    def _stand_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin; in place of `Optimizer.__init__`, which would make groups of its own."""
        self._inner = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's, with every parameter in its group; frozen ones have no state."""
        with self._all_parameters():
            return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, also one that it saved without hvfreeze."""
        with self._all_parameters():
            self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: ranks have settled which parameters travel."""
        raise UsageError("add_param_group() after wrapping: add the group to the optimizer before DistributedOptimizer")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, with the parameters that still train."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"

    @contextmanager
    def _all_parameters(self) -> Iterator[None]:
        """Put frozen parameters back into their groups for a moment."""
        for group, original in zip(self._inner.param_groups, self._groups, strict=True):
            group["params"] = list(original)
        try:
            yield
        finally:
            prune_optimizer(self._inner, self._groups)
