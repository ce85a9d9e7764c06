"""The two parts of a chain, before and behind a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.traced import Inputs, call
from hvfreeze.prefix.splits import prefix_digest


class Halves:
    """The two parts of a chain, whose blocks run one after another; `inputs` are the model's, as `call` takes them.

    Attributes:
        runs_inside: whether blocks run inside the model's own forward pass, which takes the inputs.
        needs_inputs: whether the part behind the cut uses floating-point inputs.
    """

    runs_inside = False
    needs_inputs = False

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    @torch.no_grad()
    def check(self, inputs: Inputs, cut: int) -> None:
        """Raise UsageError if the parts at `cut` do not give the bits of the model's output for `inputs`.

        Modules run in their current modes; buffers and random state are restored.
        """
        chain, name = self._chain, type(self._chain.model).__name__
        with untouched(chain, cut):
            whole = seeded(0, lambda: call(chain.model, inputs))
        if not isinstance(whole, Tensor):
            raise UsageError(
                f"{name} returns {type(whole).__name__}, but its blocks return one tensor; train a module whose "
                "forward pass returns this tensor alone, e.g. the logits, or train without a cache"
            )
        with untouched(chain, cut):
            joined = seeded(0, lambda: self.after(self.before(inputs, 0, cut, inputs), [], cut))
        if not equal_outputs(whole, joined):
            raise UsageError(
                f"cut {cut}: running the blocks of {name} one after another gives another output than its forward "
                "pass, e.g. because of a hook on the model, a replaced forward(), model.compile(), or NaN; move a hook "
                "into a module inside the model, or train without a cache"
            )

    def before(self, x: Any, start: int, stop: int, inputs: Inputs) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, the input of block `start`, which is `inputs` at 0.

        Raises:
            UsageError: there are several inputs, but a block takes one.
        """
        return self._chain.run(_only_input(x), start, stop)

    def after(self, x: Tensor, kept: Sequence[Tensor], cut: int) -> Any:
        """Return the model's output, from the output `x` of its first `cut` blocks and the result of `kept`."""
        return self._chain.run(x, cut, len(self._chain.blocks))

    def kept(self, inputs: Inputs) -> list[Tensor]:
        """Return the inputs that the part behind the cut needs, (B, ...) each; none in a chain."""
        return []

    def digest(self, cut: int) -> str:
        """Return a digest of the tensors that the part before `cut` uses."""
        return prefix_digest(self._chain, cut)


def _only_input(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs
    given = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    if len(given) != 1:
        raise UsageError(
            f"the model has {len(given)} inputs, but its first block takes one; give the model one tensor, or train "
            "without a cache"
        )
    return given[0]


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context in which blocks compute as the script does under `torch.autocast("cpu", dtype)`."""
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def seeded(seed: int, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which starts from `seed`; torch's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return work()


def equal_outputs(one: Any, other: Any) -> bool:
    """Return True if two outputs of a model have tensors of equal bits, without NaN."""
    first, second = ([leaf for leaf in tree_leaves(_plain(a)) if isinstance(leaf, Tensor)] for a in (one, other))
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second))


def _plain(answer: Any) -> Any:
    return dict(answer) if isinstance(answer, Mapping) else answer


@contextmanager
def untouched(chain: Chain, cut: int) -> Iterator[None]:
    """Restore the buffers behind `cut` after the context; those before it do not change."""
    before = [(tensor, tensor.clone()) for _, tensor in chain.named_buffers(cut)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
