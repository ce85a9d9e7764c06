"""Weight files: their formats, and the choice of the model's state among the states in a file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.imports import import_whole
from hvfreeze.plain_load import load_plain

STATES = ("state_dict", "model_state_dict", "model", "model_state", "net", "network", "module", "weights", "params")
"""Keys under which programs save a model's state, the usual ones first."""
AVERAGED = re.compile(r"(^|[._])(ema|swa)([._]|$)|averag", re.IGNORECASE)
"""Words in the names of averaged states, such as EMA."""
SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".bin", ".ckpt", ".pt", ".pth", ".pth.tar")
"""Suffixes of weight files."""
NOT_TENSORS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; fetch it with git lfs pull",
    b"<!DOCTYPE": "is a web page, not the file itself; download the file",
    b"<html": "is a web page, not the file itself; download the file",
}
"""First bytes of files that replace the intended file."""


def load_content(path: Path) -> Any:
    """Load the content of a weight file, in torch's or safetensors' format, to the CPU.

    Raises:
        UsageError: the file is safetensors, and the library is missing.
        RefusedError: it is a folder, an index of several files, a Git LFS pointer or a web page.
        Exception: it is unreadable, damaged or has other content.
    """
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.name.endswith(SUFFIXES))
        named = f", such as {inside[0]}" if inside else f" ({', '.join(SUFFIXES)}); this one has none"
        raise RefusedError(f"weights ({path}) are a folder; name a weight file in it{named}")
    if path.name.endswith(".index.json"):
        raise RefusedError(
            f"weights ({path}): the file is an index of several weight files; save them as one file, "
            f"with transformers by save_pretrained(folder, max_shard_size='100GB')"
        )
    with path.open("rb") as file:
        head = file.read(32)
    for start, what in NOT_TENSORS.items():
        if head.lower().startswith(start.lower()):
            raise RefusedError(f"weights ({path}): the file {what}")
    # Eight bytes with the length of a JSON header, and the header. In a pickle these bytes are a far larger number.
    is_safe = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**27
    if not is_safe and path.suffix != SAFETENSORS:
        # Programs save their arguments with the weights, as attributes with plain values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return load_plain(path)
    try:
        library = import_whole("safetensors.torch")
    except ImportError as error:
        raise UsageError(
            f"weights ({path}) are in safetensors format, which needs safetensors ({error}): pip install safetensors"
        ) from error
    return library.load_file(str(path))


def choose_state(content: Any, *, source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the model's state in a file's content, and notes on other content.

    Raises:
        RefusedError: there is no state, or there are several without a usual name.
    """
    states = dict(_states_in(content))
    if not states:
        raise RefusedError(
            f"weights ({source}) are not a state_dict (a mapping of names to tensors); save model.state_dict()"
        )
    usual = sorted((name for name in states if name.partition(".")[0] in STATES), key=_place)
    others = [name for name in states if name not in usual and not AVERAGED.search(name)]
    found = usual[:1] or others or list(states)
    if len(found) > 1:
        raise RefusedError(
            f"weights ({source}) hold several states: {', '.join(map(repr, found))}; save the right one "
            f"alone, or under the key state_dict"
        )
    notes, rest = list[str](), [repr(name) for name in states if name != found[0]]
    if rest:
        notes.append(f"weights ({source}): loading {found[0]!r} of several states in the file, not {', '.join(rest)}")
    elif AVERAGED.search(found[0]):
        notes.append(f"weights ({source}): loading {found[0]!r}, the only state in the file")
    state = states[found[0]]
    odd = [str(key) for key, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        notes.append(f"weights ({source}): ignoring {', '.join(odd)}, which are not tensors")
    return {str(key): value for key, value in state.items() if isinstance(value, Tensor)}, notes


def _place(name: str) -> tuple[int, int]:
    return STATES.index(name.partition(".")[0]), len(name)


def _states_in(content: Any, name: str = "", *, levels: int = 2) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the states in a file and `levels` below, with the keys that lead to them; states are not searched."""
    if not isinstance(content, Mapping):
        return
    tensors = sum(isinstance(value, Tensor) for value in content.values())
    if 2 * tensors > len(content) and not any(isinstance(value, Mapping) for value in content.values()):
        yield name, content
    elif levels > 0:
        for key, value in content.items():
            yield from _states_in(value, f"{name}.{key}" if name else str(key), levels=levels - 1)
