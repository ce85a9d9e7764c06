"""Code of the user's own that a setting names as package:function: found, called, told apart by its files' digest."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from hvfreeze.errors import UsageError

TIMM, HF = "timm:", "hf:"
"""Begin the names of a model of the timm library, and of what is in a folder or a repository of Hugging Face."""
FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")


def is_named_code(text: str) -> bool:
    """Tell whether a setting names a function, as in my_package.models:tiny."""
    return ":" in text and not text.startswith((TIMM, HF))


def check_named_code(flag: str, text: str) -> None:
    """Raise UsageError unless `text` has the form package:function; nothing is imported."""
    if not FORM.fullmatch(text):
        raise UsageError(f"--{flag} ({text}) must be package:function, such as my_package.parts:make")


def find(flag: str, text: str) -> Callable[..., Any]:
    """Return the function that `text` names; its module is looked for in the working directory too.

    Raises:
        UsageError: there is no such function, or its module fails when it is imported.
    """
    check_named_code(flag, text)
    module, _, name = text.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # the user's module may fail in any way
        raise UsageError(f"--{flag} ({text}): {module} cannot be imported: {told(error)}") from error
    if not callable(function):
        raise UsageError(f"--{flag} ({text}): {module} has no function {name}")
    found: Callable[..., Any] = function
    return found


def call(flag: str, text: str, **offered: Any) -> Any:
    """Return what the function that `text` names returns; it is given those of the arguments `offered` that it takes.

    Raises:
        UsageError: there is no such function, or it fails.
    """
    function = find(flag, text)
    try:
        taken = inspect.signature(function).parameters.values()
        everything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken)
        names = {parameter.name for parameter in taken}
        return function(**{name: value for name, value in offered.items() if everything or name in names})
    except Exception as error:  # the user's function may fail in any way
        raise UsageError(f"--{flag} ({text}) failed: {told(error)}") from error


def told(error: Exception) -> str:
    """Return an error of the user's code in one line, with the place in that code, else where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    placed = [frame for frame in frames if not _is_installed(frame.filename)] or frames[1:]
    place = f" ({Path(placed[-1].filename).name}, line {placed[-1].lineno})" if placed else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


INSTALLED = tuple(
    {
        os.path.realpath(folder)
        for folder in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
            str(Path(__file__).parent),
        )
    }
)
"""Folders of code that versions tell apart."""


def code_sha256(flag: str, text: str) -> str:
    """Return the SHA-256, as hex, of the code that the function needs; of nothing where there is no file.

    That is the file in which it is defined and, where there are any, the other files of the user's own that this one
    imports, and so on; not installed packages. Of one file it is the file's own digest.
    """
    function = inspect.unwrap(find(flag, text))
    files = dict[str, bytes]()
    try:
        path = inspect.getsourcefile(function)
        if path:
            files[function.__module__] = Path(path).read_bytes()
    except (TypeError, OSError):
        pass
    # The function may be of another module than the one that names it.
    for module in dict.fromkeys((text.partition(":")[0], *files)):
        _add_own_files(module, files)
    if len(files) <= 1:
        return hashlib.sha256(b"".join(files.values())).hexdigest()
    digest = hashlib.sha256()
    for module, content in sorted(files.items()):
        digest.update(f"{module} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _add_own_files(name: str, files: dict[str, bytes]) -> None:
    """Add a module's file to `files`, by module, and those of all that it imports, where they are the user's own."""
    left, seen = [name], set[str]()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        spec = _own_spec(module)
        if spec is None:
            continue
        # A package's own file runs before its modules'.
        left += [module.rpartition(".")[0]] if "." in module else []
        try:
            content = Path(spec.origin or "").read_bytes()
            found = list(_imported(ast.parse(content), package=spec.parent or ""))
        except (OSError, SyntaxError, ValueError):
            continue
        left += found
        if content:
            files[module] = content


def _own_spec(module: str) -> ModuleSpec | None:
    """Return where a module of the user's own lies; None for what is installed, or no module."""
    top = module.partition(".")[0]
    try:
        # To look for a module of a package imports the package: never one that is installed.
        spec = importlib.util.find_spec(top)
        if spec is not None and module != top and _is_own(spec):
            spec = importlib.util.find_spec(module)
    except Exception:  # packages of the user's may fail in any way
        return None
    return spec if spec is not None and _is_own(spec) else None


def _is_own(spec: ModuleSpec) -> bool:
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    paths = [place for place in places if place]
    return bool(paths) and not any(map(_is_installed, paths))


def _is_installed(path: str) -> bool:
    return any(os.path.realpath(path).startswith(folder + os.sep) for folder in INSTALLED)


def _imported(tree: ast.Module, *, package: str) -> Iterator[str]:
    """Yield the names of the modules that a file may import, and some that are names in them, functions' included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - max(0, node.level - 1)] if node.level else []
            base = ".".join([*filter(None, above), *filter(None, [node.module])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
            else:
                yield from (alias.name for alias in node.names)
