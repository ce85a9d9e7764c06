"""What tells one data set of somebody's own from another: class and settings, files, and a look at its samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from hvfreeze.cache.fingerprint import JSON, canonical, digest_tensors
from hvfreeze.errors import UsageError
from hvfreeze.own_loop.cached.samples import Samples, own_draws
from hvfreeze.prefix.operations import Description

SAMPLES_SHOWN = 16


def data_identity(samples: Samples, *, name: str | None) -> JSON:
    """Return what must match before rows of this data set may be used.

    Args:
        samples: the loader's.
        name: what the user calls the data set; None takes its class, its code, its settings and its files' names,
            sizes and times.

    Raises:
        UsageError: the data set gives another sample when it is asked for the same one again.
    """
    described: JSON = name if name is not None else description_of(samples.loader.dataset)
    return {"size": len(samples), "described": described, "samples": _look(samples)}


def description_of(dataset: Any) -> str:
    """Return a digest of a data set's class, code and settings, and of its files' names, sizes and times."""
    text = canonical([_DataDescription({}).of(dataset), _files(dataset)])
    return hashlib.sha256(text.encode()).hexdigest()


class _DataDescription(Description):
    """Describes a data set by all that it holds; a tensor by its content, a handle by its class alone."""

    def _described(self, value: Any) -> JSON:
        if isinstance(value, Dataset) and not isinstance(value, torch.nn.Module):
            held = {name: inner for name, inner in sorted(vars(value).items()) if not name.startswith("__")}
            return ["data", self.of(type(value)), self.of(held)]
        return super()._described(value)


def _files(dataset: Any) -> JSON:
    """Return (size, time) of the files that a folder data set, or one inside it, lists as its samples."""
    inner = getattr(dataset, "dataset", None)
    listed = getattr(dataset, "samples", None)
    found: list[JSON] = [_files(inner)] if isinstance(inner, Dataset) else []
    for entry in listed if isinstance(listed, Sequence) else ():
        path = entry[0] if isinstance(entry, Sequence) and not isinstance(entry, str) else entry
        if isinstance(path, (str, os.PathLike)) and os.path.exists(path):
            status = os.stat(path)
            found.append([status.st_size, status.st_mtime_ns])
    return found


def _look(samples: Samples) -> str:
    """Return a digest of a few samples spread over the data set, read twice."""
    count = min(len(samples), samples.batch_rows, SAMPLES_SHOWN)
    ids = np.linspace(0, len(samples) - 1, count).astype(np.int64)
    digests = []
    for seed in (1, 2):
        with own_draws(seed):
            digests.append(_digest(samples.load(ids, np.zeros_like(ids))))
    first, again = digests
    if first != again:
        raise UsageError(
            "the data set gives another sample when it is asked for the same one again, so that its activations cannot "
            "be cached: give views=K, and its random draws become K fixed views of each sample"
        )
    return first


def _digest(batch: Any) -> str:
    leaves = [leaf for part in batch for leaf in tree_leaves(dict(part) if isinstance(part, Mapping) else part)]
    return digest_tensors([(str(i), leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
