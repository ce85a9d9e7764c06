"""Epochs of batches asked of a cache, and compared with an epoch without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hvfreeze.cache.activations import PrefixActivations
from hvfreeze.cache.file.format import Keys
from tests.single.cache.material import FrozenNet, same_bits

Batches = Sequence[tuple[Keys, Keys]]
NUM_SAMPLES = 72  # four batches and a half
OWNED_KEYS = (np.arange(NUM_SAMPLES), np.zeros(NUM_SAMPLES, np.int64))


def begun(net: FrozenNet, directory: Path, cut: int = 2, **changes: Any) -> PrefixActivations:
    """A cache of all samples at `cut`."""
    cached = net.cached(directory, **changes)
    net.begin(cached, cut, OWNED_KEYS)
    return cached


def run_epoch(activations: PrefixActivations, batches: Batches, *, sweep: bool = False) -> list[Tensor]:
    activations.announce(batches)
    if sweep:
        activations.sweep()
    return [activations.get(*batch) for batch in batches]


def check_epoch(activations: PrefixActivations, net: FrozenNet, batches: Batches, *, sweep: bool = False) -> None:
    """The epoch's batches have the bits and strides of an epoch without a cache."""
    check_outputs(run_epoch(activations, batches, sweep=sweep), net, activations.cut, batches)


def check_outputs(outputs: Sequence[Tensor], net: FrozenNet, cut: int, batches: Batches) -> None:
    """These are the bits and strides of an epoch without a cache."""
    assert all(same_bits(left, right) for left, right in zip(outputs, net.outputs(cut, batches), strict=True))
