"""Digests that tell whether replicas, checkpoints and runs are equal."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import nn

from hvfreeze.errors import DivergedError
from hvfreeze.ranks.world import World


def parameter_digest(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of all parameters and buffers, as hex."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy())
    return digest.hexdigest()


def check_replicas(model: nn.Module, world: World, *, step: int) -> str:
    """Return the digest that all ranks share.

    Collective: every rank of `world` must call this, when running statistics have been averaged.

    Raises:
        DivergedError: parameters or buffers differ; the message names the ranks in the minority.
    """
    digests = world.allgather_object(parameter_digest(model), name="replica.digest")
    common, count = Counter(digests).most_common(1)[0]
    if count < world.size:
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        named = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} differ"
        who = named if count > 1 else "all ranks differ"
        raise DivergedError(f"replicas are not equal after step {step}: {who}; parameters must change by updates only")
    return common
