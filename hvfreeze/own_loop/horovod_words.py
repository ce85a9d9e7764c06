"""What arguments mean here that a script gives to `hvd.DistributedOptimizer`."""

from __future__ import annotations

import sys
from typing import Any

from hvfreeze.config.rules import parse_compression
from hvfreeze.errors import UsageError

COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
"""Horovod's, by their names."""


def compression_of(value: Any) -> str:
    """Return none, fp16 or powersgd:R for our word or for one of `hvd.Compression`'s classes.

    Raises:
        UsageError: it is neither.
    """
    known = COMPRESSORS.get(getattr(value, "__name__", ""), value)
    if not isinstance(known, str):
        raise UsageError(f"compression ({value}) must be none, fp16, powersgd:R, hvd.Compression.none or .fp16")
    parse_compression(known)
    return known


def refuse_other_averages(op: Any, gradient_predivide_factor: float) -> None:
    """Raise UsageError unless gradients are to be averaged."""
    hvd: Any = sys.modules.get("horovod.torch")
    average = getattr(hvd, "Average", None)
    if op is not None and op != average:
        raise UsageError(f"op ({op}) must be hvd.Average: gradients are averaged over ranks")
    if gradient_predivide_factor != 1.0:
        raise UsageError(
            f"gradient_predivide_factor ({gradient_predivide_factor}) must be 1: gradients are divided before they are "
            "summed, by the number of ranks"
        )
