"""Code of the user's own that a setting names as package:function: found, called, told apart by its file's digest."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvfreeze.errors import UsageError

TIMM = "timm:"
"""Begins the name of a model of the timm library."""
FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")


def is_named_code(text: str) -> bool:
    """Tell whether a setting names a function, as in my_package.models:tiny."""
    return ":" in text and not text.startswith(TIMM)


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
    """Return an error of the user's code in one line, with the place where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def code_sha256(flag: str, text: str) -> str:
    """Return the SHA-256 of the file in which the function is defined, as hex; of nothing where there is no file."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(find(flag, text)))
        return hashlib.sha256(Path(path).read_bytes() if path else b"").hexdigest()
    except (TypeError, OSError):
        return hashlib.sha256(b"").hexdigest()
