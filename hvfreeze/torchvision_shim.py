"""The one place that imports torchvision: `from hvfreeze.torchvision_shim import torchvision`.

A torchvision wheel built for CUDA next to a CPU build of torch cannot load its compiled operators, and then
`import torchvision` itself fails because two operators that it wants to describe do not exist. Models, data sets and
tensor transforms do not need them: on exactly that error the two schemas are declared here and the import is repeated.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import warnings
from typing import Any

from hvfreeze.torch_imports import compiler_stood_in_for

MISSING_OPERATOR = "operator torchvision::nms does not exist"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch withdraws a declaration when its library object is collected.
_declared: list[Any] = []


def import_torchvision() -> Any:
    """Torchvision, imported; its detection operators and native image decoding may be unavailable, with a warning.

    Raises:
        ImportError, RuntimeError: torchvision is absent or fails in any way but the one that this module mends.
    """
    try:
        return _import()
    except RuntimeError as error:
        if str(error) != MISSING_OPERATOR:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declare_operators()
    module = _import()
    if _speaks():
        warnings.warn(_mismatch(module.__version__), RuntimeWarning, stacklevel=2)
    return module


def shim_used() -> bool:
    """Whether torchvision was imported with declared stand-ins for its compiled operators."""
    return bool(_declared)


def _import() -> Any:
    with compiler_stood_in_for():
        return importlib.import_module("torchvision")


def _declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _declared.append(library)


def _speaks() -> bool:
    # One warning a job: not one from every rank and every data loading worker.
    return os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0" and multiprocessing.parent_process() is None


def _mismatch(version: str) -> str:
    import torch

    return (
        f"torchvision {version} does not fit torch {torch.__version__}: its compiled operators do not load. Models, "
        "data sets and tensor transforms work; detection operators and torchvision's own image decoding do not. "
        "Install torch and torchvision from the same index to mend it."
    )


torchvision: Any = import_torchvision()
