"""The two halves of a model that is not a chain: its own forward pass up to a cut, and from there on.

Before the cut, the pass ends when the last frozen part has returned. Behind the cut, frozen parts do not run: the last
one returns a given output, the others return tensors of the right shape that the model must not use. `check` raises an
error if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from hvfreeze.cache.fingerprint import digest_tensors
from hvfreeze.errors import UsageError
from hvfreeze.integration.split_model import Halves, equal_outputs, seeded, untouched
from hvfreeze.model.blocks import Chain
from hvfreeze.model.traced import Inputs, TracedChain, call
from hvfreeze.prefix.splits import prefix_digest


class _Reached(Exception):
    """Raised when the last part before a cut has returned."""


class SplitForward(Halves):
    """The halves of a traced model; `check` finds out whether the second needs floating-point inputs.

    Other inputs, such as tokens and masks, are always given to it.
    """

    runs_inside = True

    _chain: TracedChain

    def __init__(self, chain: TracedChain) -> None:
        super().__init__(chain)
        self._answers: dict[str, Any] = {}
        self._fixed: set[str] = set()
        """Parts whose output shape does not depend on the number of samples, such as positional embeddings."""
        self._copies = False
        self.needs_inputs = True
        self._leaves: list[Any] = []
        self._spec: TreeSpec | None = None

    def before(self, x: Any, start: int, stop: int, inputs: Inputs) -> Tensor:
        """Return the output of blocks start..stop-1, (B, ...), for `x`, the input of block `start`, unused at 0.

        Raises UsageError if the last of these blocks returns several tensors or none.
        """
        module, reached = self._last(stop), list[Any]()
        forward = module.forward

        def answer(*args: Any, **kwargs: Any) -> Any:
            reached.append(forward(*args, **kwargs))
            raise _Reached

        with ExitStack() as stack:
            self._skip(stack, start, x)
            for name in self._parts(start, stop)[:-1]:
                stack.enter_context(_replaced(self._chain.model.get_submodule(name), self._remembering(name)))
            stack.enter_context(_replaced(module, answer))
            stack.enter_context(suppress(_Reached))
            call(self._chain.model, inputs)
        if not reached:
            raise UsageError(f"block {self._chain.blocks[stop - 1].name} was not called in the forward pass")
        self._answers[self._parts(start, stop)[-1]] = tree_map(_meta, reached[0])
        return self._single(reached[0], stop)

    def after(self, x: Tensor, kept: Sequence[Tensor], cut: int) -> Any:
        """Run the model with a given output of its first blocks."""
        given = iter(kept)
        assert self._spec is not None
        leaves = [next(given) if leaf is None else _unseen(leaf, len(x)) for leaf in self._leaves]
        return self._behind(x, tree_unflatten(leaves, self._spec), cut)

    def kept(self, inputs: Inputs) -> list[Tensor]:
        """Return all tensors except floating-point inputs that the second half does not use."""
        leaves, self._spec = tree_flatten(inputs)
        given = [isinstance(leaf, Tensor) and (self.needs_inputs or not leaf.is_floating_point()) for leaf in leaves]
        self._leaves = [None if give else _meta(leaf) for leaf, give in zip(leaves, given)]
        return [leaf for leaf, give in zip(leaves, given) if give]

    def digest(self, cut: int) -> str:
        """Return the digest of the first blocks, and of the buffers that belong to no block."""
        loose = [(name, self._chain.model.get_buffer(name)) for name in self._chain.loose_buffers]
        return prefix_digest(self._chain, cut) + digest_tensors(loose)

    @torch.no_grad()
    def check(self, inputs: Inputs, cut: int) -> None:
        """Check that both halves together give the bits of the whole, and find out what the second one needs.

        Modules run in their current modes; buffers and random state are restored. Raises UsageError if the result
        differs: the model uses values from before the cut other than the output of the last block, or draws random
        numbers there.
        """
        chain = self._chain
        with untouched(chain, cut):
            whole = seeded(0, lambda: call(chain.model, inputs))
            first, again = (seeded(seed, lambda: self.before(inputs, 0, cut, inputs)) for seed in (0, 1))
            self._find_fixed(inputs, cut)
        same = equal_outputs(first, again) and self._gives(whole, first, inputs, cut)
        if not same:
            name = chain.blocks[cut - 1].name
            raise UsageError(
                f"cut {cut}: running {type(chain.model).__name__} up to {name} and then the remaining blocks gives "
                "another output than its forward pass, e.g. because of a skip connection across the cut or random "
                "numbers drawn before it; choose other blocks, or train without a cache"
            )
        self.needs_inputs = not self._gives(whole, first, tree_map(_hidden, inputs), cut)

    def _find_fixed(self, inputs: Inputs, cut: int) -> None:
        """Find the frozen parts whose output does not grow with the number of samples; changes no tensor."""
        answers, rows = dict(self._answers), len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
        longer = tree_map(lambda leaf: _with_one_more(leaf, rows), inputs)
        # A model may require one batch size and raise any error for another; then all outputs have that size.
        with suppress(Exception):
            seeded(0, lambda: self.before(longer, 0, cut, longer))
            self._fixed = {name for name, answer in answers.items() if _shapes(answer) == _shapes(self._answers[name])}
        self._answers = answers

    def _behind(self, x: Tensor, inputs: Inputs, cut: int) -> Any:
        """Return the model's output for its inputs, with `x`, (B, ...), as output of its first `cut` blocks."""
        with ExitStack() as stack:
            self._skip(stack, cut, x.clone() if self._copies else x)
            return call(self._chain.model, inputs)

    def _gives(self, whole: Any, x: Tensor, inputs: Inputs, cut: int) -> bool:
        version, kept = x._version, x.clone()
        try:
            with untouched(self._chain, cut):
                answer = seeded(0, lambda: self._behind(x, inputs, cut))
        except Exception:  # the user's module may fail in any way
            return False
        self._copies = self._copies or x._version != version
        x.copy_(kept)
        return equal_outputs(whole, answer)

    def _skip(self, stack: ExitStack, cut: int, x: Any) -> None:
        """Make the parts of the first `cut` blocks return without running, the last of them `x`, (B, ...)."""
        if cut == 0:
            return
        *others, last = self._parts(0, cut)
        for name in others:
            stack.enter_context(_replaced(self._chain.model.get_submodule(name), self._stand_in(name, len(x))))
        answer = tree_map(lambda leaf: x if isinstance(leaf, Tensor) else leaf, self._answers[last])
        stack.enter_context(_replaced(self._chain.model.get_submodule(last), lambda *args, **kwargs: answer))

    def _stand_in(self, name: str, rows: int) -> Callable[..., Any]:
        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape = (rows, *leaf.shape[1:]) if leaf.dim() and name not in self._fixed else leaf.shape
            fill = torch.nan if leaf.is_floating_point() else 0
            return torch.full(shape, fill, dtype=leaf.dtype)

        return lambda *args, **kwargs: tree_map(made, self._answers[name])

    def _remembering(self, name: str) -> Callable[..., Any]:
        forward = self._chain.model.get_submodule(name).forward

        def run(*args: Any, **kwargs: Any) -> Any:
            answer = forward(*args, **kwargs)
            self._answers[name] = tree_map(_meta, answer)
            return answer

        return run

    def _parts(self, start: int, stop: int) -> list[str]:
        return [name for parts in self._chain.parts[start:stop] for name in parts]

    def _last(self, cut: int) -> nn.Module:
        return self._chain.model.get_submodule(self._parts(0, cut)[-1])

    def _single(self, answer: Any, cut: int) -> Tensor:
        tensors = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        if len(tensors) != 1:
            name = self._chain.blocks[cut - 1].name
            raise UsageError(
                f"block {name} returns {len(tensors)} tensors, but only one tensor of shape (B, ...) can be cached"
            )
        return tensors[0]


def halves_of(chain: Chain) -> Halves:
    """Return the halves of a model in blocks."""
    return SplitForward(chain) if isinstance(chain, TracedChain) else Halves(chain)


def _meta(leaf: Any) -> Any:
    """Return a tensor without memory of the same type and shape."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


def _with_one_more(leaf: Any, rows: int) -> Any:
    """Return a tensor of `rows` samples with the first one repeated."""
    return torch.cat([leaf, leaf[:1]]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows else leaf


def _shapes(answer: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]


def _hidden(leaf: Any) -> Any:
    return _nothing_like(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _unseen(leaf: Any, rows: int) -> Any:
    return _nothing_like(leaf.new_empty(rows, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf


def _nothing_like(leaf: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that reveals its use: NaN everywhere, in a single element."""
    return torch.full((), torch.nan, dtype=leaf.dtype).expand(leaf.shape)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward pass of `module` inside the context; its hooks run as usual."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
