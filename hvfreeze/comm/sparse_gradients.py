"""Sparse gradients over ranks: of an embedding only the rows that a rank's batch has looked up travel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvfreeze.comm.gradient_exchange import Scaling
from hvfreeze.comm.world import World

DENSE = -1
"""In the place of a row's number: this rank's gradient is dense."""


def sparse_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters whose gradients the model's own layers make sparse."""
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    return frozenset(parameter for layer in layers if layer.sparse for parameter in layer.parameters())


def exchange_sparse(parameter: nn.Parameter, world: World, scaling: Scaling, *, name: str) -> int:
    """Let the gradient of an embedding, (rows, ...), be all ranks' scaled sum; return the bytes that this rank sent.

    It stays sparse, and rows may be there more than once, unless it is dense on some rank, as where another layer uses
    the same parameter. A rank without a gradient adds nothing. Collective.
    """
    gradient = parameter.grad
    dense = gradient is not None and not gradient.is_sparse
    if gradient is None or dense:
        rows = torch.full((1,) if dense else (0,), DENSE, dtype=torch.int64)
        values = torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype)
    else:
        # Not coalesced: the optimizer adds up a row's entries of all ranks in one order. And a row of it is one of the
        # parameter, however many dimensions it was sparse in.
        whole = gradient if gradient.sparse_dim() == 1 else gradient.to_dense().to_sparse(1)
        rows, values = whole._indices()[0], whole._values() * scaling.before
    everyone = world.allgather_rows(rows, name=f"{name}.rows")
    if bool((everyone == DENSE).any()):
        mine = torch.zeros_like(parameter) if gradient is None else gradient.to_dense() * scaling.before
        parameter.grad = world.allreduce_sum(mine, name=f"{name}.dense").mul_(scaling.after)
        return rows.nbytes + mine.nbytes
    summed: Tensor = world.allgather_rows(values, name=f"{name}.values") * scaling.after
    parameter.grad = torch.sparse_coo_tensor(everyone[None], summed, parameter.shape, check_invariants=False)
    return rows.nbytes + values.nbytes
