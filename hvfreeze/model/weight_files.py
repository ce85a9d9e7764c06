"""Files of weights: what formats there are, and which of the states in a file is the model's."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.plain_load import load_plain

STATES = ("state_dict", "model_state_dict", "model", "model_state", "net", "network", "module", "weights", "params")
"""Under which programs save a model's state, the usual ones first."""
AVERAGED = re.compile(r"(^|[._])(ema|swa)([._]|$)|averag", re.IGNORECASE)
"""In the names of states that are means over the steps of a training."""
DEEPEST = 2
"""Names from a file's outermost object to a state."""
SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".bin", ".ckpt", ".pt", ".pth", ".pth.tar")
"""Of files of weights."""
LONGEST_HEADER = 2**27
NOT_TENSORS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; fetch it with git lfs pull",
    b"<!DOCTYPE": "is a web page, not the file itself; download that",
    b"<html": "is a web page, not the file itself; download that",
}
"""How files begin that were meant to be others."""


def load_content(path: Path) -> Any:
    """Return what a file of weights holds, in torch's format or as safetensors, in the CPU's memory.

    Raises:
        UsageError: it is safetensors, and the library is missing.
        RefusedError: it is a folder, an index of several files, or a pointer or a page in the place of a file.
        Exception: it cannot be read, is damaged or holds anything else.
    """
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.name.endswith(SUFFIXES))
        named = f", such as {inside[0]}" if inside else f" ({', '.join(SUFFIXES)}); this one has none"
        raise RefusedError(f"weights ({path}) are a folder; name a file of weights in it{named}")
    if path.name.endswith(".index.json"):
        raise RefusedError(
            f"weights ({path}): the file is an index of several files, each with a part of the weights; save them as "
            "one file, with transformers by save_pretrained(folder, max_shard_size='100GB')"
        )
    with path.open("rb") as file:
        head = file.read(32)
    for start, what in NOT_TENSORS.items():
        if head.lower().startswith(start.lower()):
            raise RefusedError(f"weights ({path}): the file {what}")
    # Eight bytes for the length of a header in JSON.
    is_safe = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < LONGEST_HEADER
    if not is_safe and path.suffix != SAFETENSORS:
        # Programs keep their arguments beside the weights. They are attributes with plain values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return load_plain(path)
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UsageError(
            f"weights ({path}) are safetensors, which needs that library ({error}): pip install safetensors"
        ) from error
    return library.load_file(str(path))


def choose_state(content: Any, *, source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the model's state in what a file holds, and notes on what else there is.

    Raises:
        RefusedError: there is none, or several of which none has a usual name.
    """
    states = dict(_states_in(content))
    if not states:
        raise RefusedError(
            f"weights ({source}) are no state_dict: a mapping of names to tensors is needed; save model.state_dict()"
        )
    usual = sorted((name for name in states if name.partition(".")[0] in STATES), key=_place)
    others = [name for name in states if name not in usual and not AVERAGED.search(name)]
    found = usual[:1] or others or list(states)
    if len(found) > 1:
        raise RefusedError(
            f"weights ({source}) hold several states: {', '.join(map(repr, found))}; save the one that is meant alone, "
            "or under the name state_dict"
        )
    notes, rest = list[str](), [repr(name) for name in states if name != found[0]]
    if rest:
        notes.append(f"weights ({source}): of several states in the file {found[0]!r} is taken, not {', '.join(rest)}")
    elif AVERAGED.search(found[0]):
        notes.append(f"weights ({source}): {found[0]!r} is taken, the only state in the file")
    state = states[found[0]]
    odd = [str(key) for key, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        notes.append(f"weights ({source}): {', '.join(odd)} are no tensors, and are left out")
    return {str(key): value for key, value in state.items() if isinstance(value, Tensor)}, notes


def _place(name: str) -> tuple[int, int]:
    return STATES.index(name.partition(".")[0]), len(name)


def _states_in(content: Any, name: str = "", *, depth: int = 0) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the states in a file by the names that lead to them; none is looked for within a state."""
    if not isinstance(content, Mapping):
        return
    tensors = sum(isinstance(value, Tensor) for value in content.values())
    if 2 * tensors > len(content) and not any(isinstance(value, Mapping) for value in content.values()):
        yield name, content
    elif depth < DEEPEST:
        for key, value in content.items():
            yield from _states_in(value, f"{name}.{key}" if name else str(key), depth=depth + 1)
