"""A digest of a frozen prefix's computation: chains with equal digests compute the same function of their tensors.

Parameters and buffers are digested elsewhere. This covers the modules and functions that run, in order, their settings,
and their code unless it is torch's, whose version is known. A custom function is described by its code, its closure,
the functions and constants that it names, and the files of the custom modules that it names.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvfreeze.cache.fingerprint import JSON, bytes_of, canonical
from hvfreeze.model.blocks import Chain
from hvfreeze.runs.environment import version_of
from hvfreeze.user_code import is_installed

OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"train"}
"""Attributes that do not affect a module's computation; `train` is replaced in modules held in evaluation mode."""
NOT_RUN = frozenset({"__init__", "__module__", "__doc__", "__qualname__", "__firstlineno__"})
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FILED_AS = {
    "hvfreeze.model.blocks": "hvfreeze.chain.blocks",
    "hvfreeze.model.families": "hvfreeze.chain.families",
    "hvfreeze.model.model_sources": "hvfreeze.chain.models",
    "hvfreeze.model.narrow_resnets": "hvfreeze.chain.origins.narrow_resnets",
    "hvfreeze.model.steps": "hvfreeze.chain.steps",
    "hvfreeze.model.traced": "hvfreeze.chain.watched.blocks",
}
"""Former module names, under which rows are filed, so that a cache remains valid when code moves."""
LIBRARIES = ("transformers",)
"""Packages, in addition to torch, whose versions identify their code."""
VERSIONED = ("torch.", "torch", "builtins", "math", "_operator", "_functools", "collections", "typing")


def operations_digest(chain: Chain, cut: int) -> str:
    """Return a digest of the computation of the first `cut` blocks, equal in all processes and on all machines."""
    names = {id(module): name for name, module in chain.model.named_modules()}
    description = Description(names)
    steps: list[JSON] = [[description.of(step) for step in block.steps] for block in chain.blocks[:cut]]
    steps += [description.of_container(module) for module in chain.containers]
    return hashlib.sha256(canonical(steps).encode()).hexdigest()


class Description:
    """Describes modules, functions and the objects that they refer to; repeated objects are described by a number."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._seen: dict[int, int] = {}
        # Held, so that no number comes to mean another object.
        self._held: list[object] = []

    def of(self, value: Any) -> JSON:
        """Return the description of `value`."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, (float, complex, bytes, torch.dtype, torch.device, torch.memory_format, range)):
            return repr(value)
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        return self._described(value)

    def _described(self, value: Any) -> JSON:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            digest = hashlib.sha256(bytes_of(value).numpy().data).hexdigest()
            return ["tensor", str(value.dtype), list(value.shape), digest]
        if isinstance(value, (np.ndarray, np.generic)):
            return ["array", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, Mapping):
            return ["map", [[self.of(key), self.of(inner)] for key, inner in value.items()]]
        if isinstance(value, slice):
            return ["slice", self.of(value.start), self.of(value.stop), self.of(value.step)]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted(canonical(self.of(inner)) for inner in value)]
        if isinstance(value, Sequence):
            return [type(value).__name__, [self.of(inner) for inner in value]]
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if _library_of(value) and hasattr(value, "to_dict"):
            # A configuration: its methods would lead all over the library.
            return ["settings", _qualified(type(value)), self.of(value.to_dict())]
        if isinstance(value, types.ModuleType) or (callable(value) and not hasattr(value, "__dict__")):
            return ["known", _qualified(value)]
        # The attributes of a callable object belong to the function. Those of other objects would lead everywhere.
        held = dict(sorted(vars(value).items())) if callable(value) else {}
        return ["object", self.of(type(value)), self.of(held)]

    def _module(self, module: nn.Module) -> JSON:
        settings = {name: inner for name, inner in vars(module).items() if name not in OF_EVERY_MODULE}
        hooks = [list(getattr(module, name).values()) for name in HOOKS]
        code = str(module.code) if isinstance(module, torch.jit.ScriptModule) else ""
        return [
            "module",
            self._names.get(id(module), ""),
            self.of(type(module)),
            module.extra_repr(),
            self.of(dict(sorted(settings.items()))),
            self.of(hooks),
            code,
            [[name, self.of(child)] for name, child in module._modules.items() if child is not None],
        ]

    def of_container(self, module: nn.Module) -> JSON:
        """Return the code and settings of a module that runs submodules, without those of the submodules."""
        settings = {name: inner for name, inner in vars(module).items() if name not in OF_EVERY_MODULE}
        return ["container", self.of(type(module)), self.of(dict(sorted(settings.items())))]

    def _class(self, kind: type) -> JSON:
        """Return a class's name and, unless a version determines it, the code of its methods."""
        if _is_versioned(kind):
            return ["class", _qualified(kind)]
        methods: list[JSON] = []
        for owner in kind.__mro__:
            if not _is_versioned(owner):
                found = {name: _unwrapped(inner) for name, inner in vars(owner).items() if name not in NOT_RUN}
                used = {name: inner for name, inner in sorted(found.items()) if _is_constant_or_function(inner)}
                methods += [[name, self.of(inner)] for name, inner in used.items()]
        return ["class", _qualified(kind), methods]

    def _function(self, function: Callable[..., Any]) -> JSON:
        if _is_versioned(function) or not isinstance(function, types.FunctionType):
            return ["known", _qualified(function)]
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        named = {name: function.__globals__[name] for name in _names_in(function.__code__) & set(function.__globals__)}
        # Other globals matter only as arguments.
        constants = {name: inner for name, inner in sorted(named.items()) if _is_constant_or_function(inner)}
        files: JSON = {name: digest for name, inner in sorted(named.items()) if (digest := _digest_of_files(inner))}
        return [
            "function",
            _qualified(function),
            self._code(function.__code__),
            self.of(cells),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            self.of(constants),
            *([files] if files else []),
        ]

    def _code(self, code: types.CodeType) -> JSON:
        """Return the instructions, constants and names of compiled code, without file positions."""
        constants = [
            self._code(inner) if isinstance(inner, types.CodeType) else self.of(inner) for inner in code.co_consts
        ]
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return [code.co_code.hex(), constants, [list(own) for own in names], code.co_argcount]


def _unwrapped(member: object) -> object:
    """Return the function of a static method, class method or property."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that compiled code looks up, including its inner functions."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _digest_of_files(value: object) -> str:
    """Return a digest of a custom module's file, or of all files of a custom package; empty for all other values."""
    file = getattr(value, "__file__", None)
    if not isinstance(value, types.ModuleType) or not file or is_installed(file):
        return ""
    if value.__name__.partition(".")[0] == "hvfreeze":
        return ""
    path = Path(file)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files if each.is_file())).hexdigest()


def _is_constant_or_function(value: object) -> bool:
    plain = (bool, int, float, str, tuple, torch.dtype)
    return isinstance(value, (types.FunctionType, functools.partial, Tensor, *plain))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_versioned(value: Any) -> bool:
    """Return True if the version of Python, torch or a library determines the code of a class or function."""
    module = getattr(value, "__module__", None) or ""
    return module in VERSIONED or module.startswith("torch.") or bool(_library_of(value))


def _library_of(value: Any) -> str:
    """Return the one of `LIBRARIES` that the code of a class, function or object is from, with its version."""
    package = (getattr(value, "__module__", None) or "").partition(".")[0]
    return f"{package} {version_of(package)}" if package in LIBRARIES else ""


def _qualified(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or ""
    library = _library_of(value)
    return f"{library + ' ' if library else ''}{FILED_AS.get(module, module)}.{name}"
