"""User code named as package:function in settings: find it, call it, and digest its files."""

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
from hvfreeze.wording import did_you_mean

TIMM, HF = "timm:", "hf:"
"""Prefixes of timm's models, and of folders and repositories of Hugging Face."""
FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")


def is_named_code(text: str) -> bool:
    """Return True if a setting names a function, such as my_package.models:tiny; a path may have a colon too."""
    return ":" in text and os.sep not in text and not text.startswith((TIMM, HF))


def check_named_code(flag: str, text: str) -> None:
    """Raise UsageError unless `text` has the form package:function; nothing is imported."""
    if not FORM.fullmatch(text):
        raise UsageError(f"--{flag} ({text}) must be package:function, such as my_package.parts:make")


def find(flag: str, text: str) -> Callable[..., Any]:
    """Return the function named by `text`; its module may also be in the working directory.

    Raises:
        UsageError: there is no such function, or importing its module fails.
    """
    check_named_code(flag, text)
    module, _, name = text.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found_in = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Another module may be missing that this one imports.
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"--{flag} ({text}): there is no module {error.name}; put {error.name.rpartition('.')[2]}.py into the "
                f"working directory ({here}), or its folder on PYTHONPATH"
            ) from error
        raise UsageError(f"--{flag} ({text}): {module} cannot be imported: {told(error)}") from error
    except Exception as error:  # the user's module may fail in any way
        raise UsageError(f"--{flag} ({text}): {module} cannot be imported: {told(error)}") from error
    function = getattr(found_in, name, None)
    if not callable(function):
        known = [each for each, value in vars(found_in).items() if callable(value) and not each.startswith("_")]
        hint = did_you_mean(name, known)
        raise UsageError(f"--{flag} ({text}): {found_in.__file__ or module} has no function {name}{hint}")
    found: Callable[..., Any] = function
    return found


def call(flag: str, text: str, **offered: Any) -> Any:
    """Call the function named by `text` with those arguments of `offered` that it takes, and return its result.

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
    """Format an error of user code on one line, with its place in that code, else the place where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    placed = [frame for frame in frames if not is_installed(frame.filename)] or frames[1:]
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
"""Folders of installed code, which versions identify."""


def code_sha256(flag: str, text: str) -> str:
    """Return the SHA-256 of the function's code, as hex; of nothing if there is no file.

    The code is the file that defines the function and all user files that it imports, directly or not, without
    installed packages. For a single file it is the file's digest.
    """
    function = inspect.unwrap(find(flag, text))
    files = dict[str, bytes]()
    try:
        path = inspect.getsourcefile(function)
        if path:
            files[function.__module__] = Path(path).read_bytes()
    except (TypeError, OSError):
        pass
    # The function may come from another module than the named one.
    for module in dict.fromkeys((text.partition(":")[0], *files)):
        _add_own_files(module, files)
    if len(files) <= 1:
        return hashlib.sha256(b"".join(files.values())).hexdigest()
    digest = hashlib.sha256()
    for module, content in sorted(files.items()):
        digest.update(f"{module} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _add_own_files(name: str, files: dict[str, bytes]) -> None:
    """Add the user files of a module and of all its imports to `files`, by module."""
    left, seen = [name], set[str]()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        spec = _own_spec(module)
        if spec is None:
            continue
        # A package's __init__ runs before its modules.
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
    """Return the location of a user module; None for installed modules and other names."""
    top = module.partition(".")[0]
    try:
        # Finding a module of a package imports the package, so installed packages are excluded.
        spec = importlib.util.find_spec(top)
        if spec is not None and module != top and _is_own(spec):
            spec = importlib.util.find_spec(module)
    except Exception:  # the user's packages may fail in any way
        return None
    return spec if spec is not None and _is_own(spec) else None


def _is_own(spec: ModuleSpec) -> bool:
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    paths = [place for place in places if place]
    return bool(paths) and not any(map(is_installed, paths))


def is_installed(path: str) -> bool:
    """Return True if a file is in one of the `INSTALLED` folders."""
    return any(os.path.realpath(path).startswith(folder + os.sep) for folder in INSTALLED)


def _imported(tree: ast.Module, *, package: str) -> Iterator[str]:
    """Yield the names of modules that a file may import, also in functions, and of some names inside modules."""
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
