"""The fingerprint of cached rows: everything that must match before a row may be used.

Identity fields decide whether a row is the right one: a file that differs in any of them is refused, and the fields are
named. Exactness fields (rows per batch, threads) only decide whether this run would compute the same bits: a
file that differs in them is used, and the run reports that its cache is not exact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


def canonical(value: JSON) -> str:
    """Return canonical JSON: sorted keys, no spaces, tuples as lists; NaN and Inf are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Fingerprint:
    """Identity and exactness fields, JSON values only; `digest` covers the identity fields only."""

    fields: Mapping[str, JSON]
    exactness: Mapping[str, JSON]
    digest: str

    @classmethod
    def of(cls, fields: Mapping[str, JSON], *, exactness: Mapping[str, JSON] | None = None) -> Fingerprint:
        """Return the fingerprint of these fields, with tuples as lists, as if read back from a file.

        Without `exactness` the rows are of unknown or mixed origin, which is never exact.
        """
        identity = canonical(fields)
        digest = hashlib.sha256(b"hvfreeze activation identity\0" + identity.encode()).hexdigest()
        return cls(json.loads(identity), json.loads(canonical(exactness or {})), digest)

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the identity fields in which `other` differs, sorted; empty when its rows may be used."""
        names = sorted(set(self.fields) | set(other.fields))
        return tuple(name for name in names if _shown(self.fields, name) != _shown(other.fields, name))

    def is_exact(self, other: Fingerprint) -> bool:
        """Return True if rows written under `other` have the bits that a run with this fingerprint would compute."""
        return bool(other.exactness) and self._exactness_text == other._exactness_text

    @cached_property
    def _exactness_text(self) -> str:
        # Asked for every batch that is read.
        return canonical(self.exactness)

    def explain(self, other: Fingerprint) -> str:
        """Return the differing fields with both values, for a message: `cut (file 2, run 3)`."""
        parts = []
        for name in self.differences(other):
            theirs, ours = (_shorten(_shown(fields, name)) for fields in (other.fields, self.fields))
            parts.append(f"{name} (file {theirs}, run {ours})")
        return ", ".join(parts)


def activation_fingerprint(
    *,
    prefix: str,
    operations: JSON,
    cut: int,
    data: JSON,
    split: str,
    transform: JSON,
    data_seed: int,
    augment: str,
    dtype: str,
    input_shape: Sequence[int],
    memory_format: str,
    precision: str,
    batch_rows: int,
    threads: int,
    via: Sequence[int] = (),
) -> Fingerprint:
    """Return the fingerprint of a frozen prefix's output for a data set on this machine.

    `prefix` is `digest_tensors` of the prefix, and `operations` a digest of its computation. `cache ls` shows the
    `name` in `operations` and `data`. `transform` is everything between stored pixels and the prefix's input that is
    not drawn per view. `input_shape` is (C, H, W). `via` are the cuts, ascending, after which rows of a narrower
    `dtype` were rounded, so that a rounded row depends only on the sample. `batch_rows`, of every forward pass, and
    torch's `threads` only decide about exactness.
    """
    identity: dict[str, JSON] = {
        "prefix": prefix,
        "operations": operations,
        "cut": cut,
        "data": data,
        "split": split,
        "transform": transform,
        "data_seed": data_seed,
        "augment": augment,
        "dtype": dtype,
        "input_shape": list(input_shape),
        "memory_format": memory_format,
        "precision": precision,
        "via": list(via),
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    return Fingerprint.of(identity, exactness={"batch_rows": batch_rows, "threads": threads})


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements' bytes in logical order, as a vector of uint8."""
    # A copy even of a contiguous tensor: one with a single element in some dimension may have any stride there.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 over names, types, shapes and bytes, in the order given; strides do not count."""
    digest = hashlib.sha256()
    for name, tensor in named:
        head = canonical([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def _shown(fields: Mapping[str, JSON], name: str) -> str:
    return canonical(fields[name]) if name in fields else "absent"


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
