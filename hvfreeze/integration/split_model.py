"""A model before and behind a cut, whether it is a chain or runs as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.model.blocks import Chain
from hvfreeze.model.split_forward import SplitForward, hidden
from hvfreeze.model.traced import Inputs, TracedChain
from hvfreeze.prefix.splits import prefix_digest


class Halves:
    """The two parts of a chain, whose blocks run one after another; `inputs` are the model's, as `call` takes them.

    Attributes:
        runs_inside: whether blocks run inside the model's own forward pass, which takes the inputs.
    """

    runs_inside = False

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    @property
    def needs_inputs(self) -> bool:
        """Whether the part behind the cut looks at numbers of a floating type among the inputs."""
        return False

    def check(self, inputs: Inputs, cut: int) -> None:
        """Raise UsageError where the parts at `cut` do not give what the model gives for `inputs`.

        A chain was compared with its model when it was made.
        """

    def before(self, x: Any, start: int, stop: int, inputs: Inputs) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, the input of block `start`, which is `inputs` at 0."""
        return self._chain.run(x if isinstance(x, Tensor) else x[0], start, stop)

    def after(self, x: Tensor, kept: Sequence[Tensor], cut: int) -> Any:
        """Return what the model gives, from the output `x` of its first `cut` blocks and what `kept` returned."""
        return self._chain.run(x, cut, len(self._chain.blocks))

    def kept(self, inputs: Inputs) -> list[Tensor]:
        """Return of these inputs what the part behind the cut is given, (B, ...) each; nothing in a chain."""
        return []

    def digest(self, cut: int) -> str:
        """Return a digest of the tensors that the part before `cut` computes with."""
        return prefix_digest(self._chain, cut)


class TracedHalves(Halves):
    """Those of a model that runs as it is written, left or entered in the middle."""

    runs_inside = True

    _chain: TracedChain

    def __init__(self, chain: TracedChain) -> None:
        super().__init__(chain)
        self._passage = SplitForward(chain)
        self._leaves: list[Any] = []
        self._spec: TreeSpec | None = None

    @property
    def needs_inputs(self) -> bool:
        """As `check` has found."""
        return self._passage.needs

    def check(self, inputs: Inputs, cut: int) -> None:
        """Compare both parts with the whole."""
        self._passage.check(inputs, cut)

    def before(self, x: Any, start: int, stop: int, inputs: Inputs) -> Tensor:
        """Run the model up to block `stop`."""
        return self._passage.before(inputs, stop, start=start, x=x if start else None)

    def after(self, x: Tensor, kept: Sequence[Tensor], cut: int) -> Any:
        """Run the model with its first blocks' answer given."""
        given = iter(kept)
        assert self._spec is not None
        leaves = [next(given) if leaf is None else _unseen(leaf, len(x)) for leaf in self._leaves]
        return self._passage.after(x, tree_unflatten(leaves, self._spec), cut)

    def kept(self, inputs: Inputs) -> list[Tensor]:
        """Return all tensors, but for numbers of a floating type that nobody looks at."""
        leaves, self._spec = tree_flatten(inputs)
        given = [isinstance(leaf, Tensor) and (self.needs_inputs or not leaf.is_floating_point()) for leaf in leaves]
        self._leaves = [None if give else _meta(leaf) for leaf, give in zip(leaves, given)]
        return [leaf for leaf, give in zip(leaves, given) if give]

    def digest(self, cut: int) -> str:
        """Return that of the first blocks, and of the buffers that belong to no block."""
        loose = [(name, self._chain.model.get_buffer(name)) for name in self._chain.loose_buffers]
        return prefix_digest(self._chain, cut) + digest_tensors(loose)


def halves_of(chain: Chain) -> Halves:
    """Return the halves of a model in blocks."""
    return TracedHalves(chain) if isinstance(chain, TracedChain) else Halves(chain)


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context in which blocks compute as the script does under `torch.autocast("cpu", dtype)`."""
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _meta(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


def _unseen(leaf: Any, rows: int) -> Any:
    return hidden(leaf.new_empty(rows, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf
