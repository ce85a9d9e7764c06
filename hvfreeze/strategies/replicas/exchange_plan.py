"""What a strategy tells of its steps so that the exchange may be planned, and the plan where there is none to make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ExchangePlan(Protocol):
    """What the strategy tells of its steps, and asks when it reports."""

    def after_step(self) -> None:
        """Count a step, and choose when enough were made. Collective."""

    def follow(self) -> None:
        """Choose anew for the parameters that are carried now. Collective."""

    def report(self) -> dict[str, Any]:
        """Return what belongs in the summary: `exchange`, or nothing. Not a collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was chosen and why. Not a collective."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep to what was chosen; to be called before the reducer's state is put back. Not a collective."""


class NoPlan:
    """Of a run whose ranks share one machine, or that has one rank: the network costs nothing to speak of."""

    def after_step(self) -> None:
        """Count nothing."""

    def follow(self) -> None:
        """Choose nothing."""

    def report(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep nothing."""
