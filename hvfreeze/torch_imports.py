"""Imports that start faster: without the garbage collector, and without torch's compiler where nothing is compiled.

Torch loads it to hide a method from it and to tell it of an optimizer's step, and torchvision for a function that
detection calls.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import ModuleType
from typing import Any


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Spare what is imported inside from the garbage collector: now, in the run, and at the interpreter's end.

    Torch's half a million objects live as long as the process. Looking through them takes a sixth of the time of the
    imports, a tenth of a second in every full collection, and half a second at the end.
    """
    loaded = len(sys.modules)
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Not where nothing was left to import: what else has been made by then may become garbage.
        if len(sys.modules) > loaded:
            gc.freeze()
        gc.enable()


@contextmanager
def imported_beside(module: str) -> Iterator[None]:
    """Import a module in a thread while what is inside waits for something else, as for other processes.

    What is inside should import nothing that shares modules with it: threads that import each other's halves may see
    some that are not whole. An error is left to whoever imports the module next, and meets it again.
    """

    def begin() -> None:
        with suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=begin, name="imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


COMPILER = "torch._dynamo"
UTILITIES = "torch._dynamo.utils"
HIDDEN = "__dynamo_disable"
"""The attribute under which torch keeps a method as it is once hidden."""


@contextmanager
def compiler_stood_in_for() -> Iterator[None]:
    """Let torchvision be imported inside without the compiler, which is loaded when something of it is needed."""
    if COMPILER in sys.modules:
        yield
        return
    stand_in = sys.modules[UTILITIES] = _StandIn(UTILITIES)
    try:
        yield
    finally:
        if sys.modules.get(UTILITIES) is stand_in:
            del sys.modules[UTILITIES]


class _StandIn(ModuleType):
    """What torchvision imports of the compiler; it asks for the rest of a module by loading it."""

    @staticmethod
    def is_compile_supported(device_type: Any) -> bool:
        """Return what the compiler says."""
        return bool(importlib.import_module(UTILITIES).is_compile_supported(device_type))

    def __getattr__(self, name: str) -> Any:
        # `inspect` asks every module for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(UTILITIES) is self:
            del sys.modules[UTILITIES]
        return getattr(importlib.import_module(UTILITIES), name)


def leave_compiler_out() -> None:
    """Have methods that a run calls outside of all that is compiled called as they are, without hiding them first."""
    if COMPILER in sys.modules:
        return
    import torch
    from torch.optim import Optimizer
    from torch.utils.flop_counter import _FlopCounterMode

    optimizer = Optimizer.add_param_group, Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.zero_grad
    for method in (*optimizer, _FlopCounterMode.__torch_dispatch__):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            setattr(plain, HIDDEN, plain)
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if step is not None and step.__code__.co_name == TELLING:
            kind.step = _not_telling(step.__wrapped__)


TELLING = "_use_grad"
"""Torch's name for an optimizer's step that tells the compiler that a graph ends there."""


def _not_telling(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step in the gradient mode in which torch makes it, not told to the compiler."""
    import torch

    @wraps(step)
    def in_its_mode(self: Any, *rest: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *rest, **named)

    return in_its_mode
