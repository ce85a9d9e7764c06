"""What a row of a script's cache is: under which fingerprint, and whether its bits depend on its place in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hvfreeze.cache.fingerprint import JSON, Fingerprint, activation_fingerprint
from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.watched.calls import Inputs
from hvfreeze.prefix.operations import operations_digest


def fingerprint_of(
    chain: Chain,
    cut: int,
    *,
    prefix: str,
    data: JSON,
    inputs: Inputs,
    num_views: int,
    seed: int,
    precision: torch.dtype,
    batch_rows: int,
) -> Fingerprint:
    """Return what must match before rows at `cut` may be used.

    Args:
        chain: the model; containers compute in the mode that it is in, training or evaluation.
        cut: number of frozen blocks.
        prefix: digest of the tensors that they compute with.
        data: identity of the data set.
        inputs: a batch of the model's inputs, for types, shapes and strides.
        num_views: fixed views of each sample.
        seed: of the views' draws.
        precision: of autocast; float32 without.
        batch_rows: rows of every forward.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return activation_fingerprint(
        prefix=prefix,
        operations=operations_digest(chain, cut),
        cut=cut,
        data=data,
        split="train" if chain.model.training else "eval",
        transform=[[str(leaf.dtype), list(leaf.shape[1:]), list(leaf.stride())] for leaf in leaves],
        data_seed=seed,
        augment="none" if num_views == 1 else f"views:{num_views}",
        dtype="native",
        input_shape=list(leaves[0].shape[1:]),
        memory_format=str(list(leaves[0].stride())),
        precision=str(precision).removeprefix("torch."),
        batch_rows=batch_rows,
        threads=torch.get_num_threads(),
    )


def is_steady(run: Callable[[Any], Tensor], inputs: Inputs) -> bool:
    """Tell whether a row's bits stay the same when the rows of a batch change places.

    Args:
        run: inputs -> the frozen prefix's output, (B, ...).
        inputs: a batch of them.
    """
    straight = run(inputs)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(straight)))

    def moved(leaf: Any) -> Any:
        return torch.index_select(leaf, 0, order, out=torch.empty_like(leaf)) if isinstance(leaf, Tensor) else leaf

    return torch.equal(straight.index_select(0, order), run(tree_map(moved, inputs)))
