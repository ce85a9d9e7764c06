"""The one place that imports torchvision: `from hvfreeze.torchvision_shim import torchvision`.

A torchvision wheel for CUDA cannot load its compiled operators with a CPU build of torch, and `import torchvision`
fails because two operators are missing. Models, datasets and tensor transforms do not need them: on exactly this error,
this module declares the two schemas and repeats the import. Detection operators and torchvision's image decoding then
fail when called; `hvfreeze doctor` reports that.
"""

from __future__ import annotations

import sys
from typing import Any

from hvfreeze.imports import import_whole

MISSING_OPERATOR = "operator torchvision::nms does not exist"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch removes a declaration when its library object is collected.
_declared: list[Any] = []


def import_torchvision() -> Any:
    """Import torchvision and return it; its detection operators and native image decoding may be missing.

    Raises:
        ImportError, RuntimeError: torchvision is absent or fails with another error than the one described above.
    """
    try:
        return import_whole("torchvision")
    except RuntimeError as error:
        if str(error) != MISSING_OPERATOR:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declare_operators()
    return import_whole("torchvision")


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
