"""The one place that imports torchvision: `from hvfreeze.torchvision_shim import torchvision`.

A torchvision wheel built for CUDA next to a CPU build of torch cannot load its compiled operators, and then
`import torchvision` itself fails because two operators that it wants to describe do not exist. Models, data sets and
tensor transforms do not need them: on exactly that error the two schemas are declared here and the import is repeated.
Detection operators and torchvision's own image decoding then fail when they are called; `hvfreeze doctor` says so.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

MISSING_OPERATOR = "operator torchvision::nms does not exist"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch withdraws a declaration when its library object is collected.
_declared: list[Any] = []


def import_torchvision() -> Any:
    """Import torchvision and return it; its detection operators and native image decoding may be missing.

    Raises:
        ImportError, RuntimeError: torchvision is absent or fails in any way but the one that this module mends.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if str(error) != MISSING_OPERATOR:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declare_operators()
    return importlib.import_module("torchvision")


def shim_used() -> bool:
    """Return True if torchvision was imported with declared stand-ins for its compiled operators."""
    return bool(_declared)


def _declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _declared.append(library)


torchvision: Any = import_torchvision()
