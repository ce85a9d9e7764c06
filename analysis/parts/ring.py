"""A model of a step whose gradients travel around a ring of nodes; see `analysis.scaling` for its equations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from hvfreeze.comm.reducer import BUCKET_BYTES

LATENCY = 50e-6
"""Seconds of a message from node to node, assumed: TCP over Ethernet, with its way through both systems."""
LATENCIES = (0.0, LATENCY, 200e-6)
"""The least that is possible, what is assumed, and a slow network."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step on a network: what it consists of, and how long it took."""

    variant: str
    nodes: int
    bandwidth: float
    """Bits per second."""
    work: float
    """Seconds of a step on one node."""
    backward: float
    """Seconds of its backward pass, which hides some of the exchange."""
    payload: float
    """Bytes of gradients a step."""
    cores: int
    """Cores that all nodes share; with as many as nodes, each has its own."""
    seconds: float = float("nan")

    @property
    def crowd(self) -> float:
        """Ranks per core."""
        return max(1.0, self.nodes / self.cores)


@dataclass(frozen=True)
class Model:
    """What the fit found."""

    efficiency: float
    """Part of the link's rate that gradients travel at."""
    copying: float
    """Seconds of a processor to copy and to sum a byte."""
    hidden: float
    """Part of the backward pass that the exchange can hide behind."""
    latency: float = LATENCY

    def step(self, point: Point) -> float:
        """Return the predicted seconds of a step."""
        sent = 2 * (point.nodes - 1) / point.nodes * point.payload
        messages = 2 * (point.nodes - 1) * math.ceil(point.payload / BUCKET_BYTES)
        exchange = (
            sent * (8 / (self.efficiency * point.bandwidth) + self.copying * point.crowd) + messages * self.latency
        )
        return point.work * point.crowd + max(0.0, exchange - self.hidden * point.backward * point.crowd)


def fit(points: Sequence[Point]) -> Model:
    """Return the model with the smallest relative errors."""

    def errors(values: NDArray[np.float64]) -> list[float]:
        model = Model(*map(float, values))
        return [(model.step(point) - point.seconds) / point.seconds for point in points]

    found = optimize.least_squares(
        errors, x0=(0.7, 2e-9, 0.5), bounds=((0.02, 0, 0), (1, 1e-6, 1)), x_scale=(1, 1e-9, 1)
    )
    return Model(*map(float, found.x))


def efficiency(model: Model, point: Point) -> float:
    """Return the throughput as a part of that of as many nodes that need not communicate."""
    return point.work / model.step(point)
