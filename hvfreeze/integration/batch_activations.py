"""The batches of a `CachedLoader`: tensors with one row per sample that a script may move, select and mix.

To check that a script did nothing else, each operation also runs on a batch of equal rows. Moving, selecting and mixing
rows leave such a batch unchanged; normalizing, flipping, cropping and erasing do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from hvfreeze.errors import UsageError

TOLERANCE = 1e-3
"""Tolerance for the sum of mixing weights, which must be 1; at least four roundings of the rows' type."""
MIXED = (
    "suffix() needs unmixed rows of this model: it also takes other inputs of each sample, and these are not mixed "
    "with the rows. Mix inside the model, or train without CachedLoader"
)


@dataclass(frozen=True)
class Origin:
    """The batch that rows come from.

    Attributes:
        cut: number of frozen blocks.
        inputs: the model's inputs, as the suffix takes them.
        leaves: the tensors and other values in `inputs`.
        spec: their nesting.
        place: index of the rows among the leaves; -1 if they are the output of frozen blocks.
        shape: shape of a row.
        dtype: type of the rows.
    """

    cut: int
    inputs: Any
    leaves: list[Any]
    spec: TreeSpec
    place: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def others(self) -> list[Tensor]:
        """Tensors that belong to the same samples."""
        return [leaf for i, leaf in enumerate(self.leaves) if i != self.place and isinstance(leaf, Tensor)]

    def equal_rows(self, count: int) -> Tensor:
        """Return `count` equal rows, whose numbers differ within a row."""
        generator = torch.Generator().manual_seed(0)
        row = torch.randint(2 if self.dtype == torch.bool else 100, self.shape, generator=generator).to(self.dtype)
        return row.expand(count, *self.shape)

    def marked_rows(self, count: int) -> Tensor:
        """Return `count` rows, each filled with its index, so that a mixture is detected."""
        numbers = torch.arange(count, dtype=torch.float64).add(torch.pi).square()
        return numbers.reshape(-1, *[1] * len(self.shape)).expand(count, *self.shape)


class BatchActivations(Tensor):
    """The output of the frozen blocks for a batch, (B, ...); while no block is frozen, the model's first input tensor.

    Pass it to `CachedLoader.suffix`. Before that, a script may move rows (`to`, `clone`), select some (`rows[:8]`,
    `split`, `flip(0)`) and mix them with each other, as MixUp and CutMix do. `suffix` refuses rows that were changed in
    another way, such as normalized or flipped ones, because the frozen blocks have computed them without that change.

    Attributes:
        cut: number of frozen blocks; 0 means that the rows are the inputs themselves.
        inputs: the model's inputs at cut 0; at other cuts, the tensors among them that the suffix reads.
    """

    _origin: Origin
    _example: Tensor | None
    """The batch of equal rows after the same operations; None before the first one."""
    _marks: Tensor | None
    """The rows filled with their indices after the same operations, if other tensors belong to the samples."""

    @classmethod
    def of(cls, cut: int, rows: Tensor | None, inputs: Any, *, count: int) -> BatchActivations:
        """Return a batch of `count` samples: the output `rows` of frozen blocks (None at cut 0), and the inputs."""
        leaves, spec = tree_flatten(inputs)
        place = -1
        if rows is None:
            known = [
                i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count
            ]
            place = known[0] if known else -1
            rows = leaves[place] if known else torch.empty(count, 0)
        return cls._track(rows, Origin(cut, inputs, leaves, spec, place, rows.shape[1:], rows.dtype), None, None)

    @classmethod
    def _track(cls, rows: Tensor, origin: Origin, example: Tensor | None, marks: Tensor | None) -> BatchActivations:
        tracked = rows.as_subclass(cls)
        tracked._origin, tracked._example, tracked._marks = origin, example, marks
        return tracked

    @property
    def cut(self) -> int:
        """Number of frozen blocks."""
        return self._origin.cut

    @property
    def inputs(self) -> Any:
        """The model's inputs at cut 0; at other cuts, the tensors among them that the suffix reads."""
        return self._origin.inputs

    @property
    def tensor(self) -> Tensor | None:
        """The output of the frozen blocks as a plain tensor, None at cut 0."""
        return None if self.cut == 0 else self._plain

    @property
    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def for_suffix(self) -> tuple[Tensor | None, Any]:
        """Return the input of the blocks behind the cut: the output of those before it, None at cut 0, and the inputs.

        Raises:
            UsageError: the rows are neither samples nor mixtures of samples any more.
        """
        origin, rows = self._origin, self._plain
        if self._example is None:
            return self.tensor, origin.inputs
        example, expected = self._example, origin.equal_rows(len(rows) if rows.dim() else 1)
        exact = not (origin.dtype.is_floating_point and rows.dtype.is_floating_point)
        tolerance = 0.0 if exact else max(TOLERANCE, 4 * torch.finfo(rows.dtype).eps)
        whole = rows.dim() > 0 and rows.shape[1:] == origin.shape and not (exact and rows.dtype != origin.dtype)
        if not whole or not torch.allclose(example.double(), expected.double(), rtol=tolerance, atol=tolerance):
            raise UsageError(
                "suffix() takes rows of a CachedLoader that are whole, selected, moved, or mixed with each other "
                "(MixUp, CutMix). These rows were changed in another way, which the frozen blocks cannot see; "
                "transform the images in the data set"
            )
        leaves = self._leaves_of(rows)
        return (rows if origin.cut else None), tree_unflatten(leaves, origin.spec)

    def _leaves_of(self, rows: Tensor) -> list[Any]:
        """Return the leaves of the inputs for these rows."""
        origin = self._origin
        if not origin.others:
            return [rows if i == origin.place else leaf for i, leaf in enumerate(origin.leaves)]
        count = len(origin.others[0])
        if self._marks is None:
            raise UsageError(MIXED)
        marks, known = self._marks.reshape(len(rows), -1), origin.marked_rows(count).reshape(count, -1)
        found = (marks[:, None, :1] == known[None, :, :1])[..., 0] if marks.shape[1] else torch.zeros(len(rows), count)
        if not (bool(found.any(1).all()) and torch.equal(marks, known[found.int().argmax(1)])):
            raise UsageError(MIXED)
        source = found.int().argmax(1)
        return [
            rows if i == origin.place else leaf[source] if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(origin.leaves)
        ]

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the rows, and on the examples that show what was computed."""
        given = (args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        tracked = {id(leaf): leaf for leaf in tensors if isinstance(leaf, BatchActivations)}
        if any(leaf.requires_grad for leaf in tensors if id(leaf) not in tracked):
            raise UsageError(
                "rows of a CachedLoader were combined with a tensor that requires gradients; call "
                "loader.suffix(rows) instead of the model, and compare its output with the labels"
            )
        with torch._C.DisableTorchFunctionSubclass():
            rows = {key: leaf.as_subclass(Tensor) for key, leaf in tracked.items()}
            examples = {key: leaf._example_now() for key, leaf in tracked.items()} if func in WRITING else {}
            result = _call(func, given, rows)
            reads = getattr(func, "__name__", "") == "__get__" and func != DATA  # such as `_base`
            if func not in WRITING and (reads or not _holds_tensors(result)):
                return result
            examples = examples or {key: leaf._example_now() for key, leaf in tracked.items()}
            with torch.random.fork_rng(devices=[]):
                example = _call(func, given, examples)
                mark = _marked(func, given, tracked)
            origin = _common([leaf._origin for leaf in tracked.values()])
            same = {id(plain): tracked[key] for key, plain in rows.items()}

            def track(one: Any, of: Any, marks: Any) -> Any:
                known = same.get(id(one))
                if known is not None or not isinstance(one, Tensor):
                    return one if known is None else known
                return cls._track(one, origin, of, marks)

            if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
                marks = mark if isinstance(mark, (list, tuple)) else [None] * len(result)
                return type(result)(map(track, result, example, marks))
            return track(result, example, mark)

    def _example_now(self) -> Tensor:
        if self._example is None:
            count = self.size(0)
            self._example = self._origin.equal_rows(count).clone()
            if self._origin.others:
                self._marks = self._origin.marked_rows(count).clone()
        return self._example


DATA = vars(torch._C.TensorBase)["data"].__get__
WRITING = (Tensor.__setitem__,)
"""Functions that change rows in place and return nothing."""


def _call(func: Callable[..., Any], given: Any, by: dict[int, Tensor]) -> Any:
    """Call `func` with other tensors in place of tracked ones."""
    args, kwargs = tree_map(lambda leaf: by.get(id(leaf), leaf), given)
    return func(*args, **kwargs)


def _holds_tensors(result: Any) -> bool:
    return any(isinstance(one, Tensor) for one in (result if type(result) in (list, tuple) else [result]))


def _marked(func: Callable[..., Any], given: Any, tracked: dict[int, BatchActivations]) -> Any:
    """Return the result of `func` for rows filled with their indices; None if not needed or not returned."""
    marks = {key: leaf._marks for key, leaf in tracked.items() if leaf._marks is not None}
    try:
        return _call(func, given, marks) if marks else None
    except Exception:  # `for_suffix` says that they were mixed
        return None


def _common(origins: list[Origin]) -> Origin:
    """Return the origin of rows that were combined.

    Raises:
        UsageError: they have different cuts, or other tensors belong to the samples of one of several batches.
    """
    first = origins[0]
    if any(other.cut != first.cut or other.shape != first.shape for other in origins):
        raise UsageError("rows of different cuts cannot be mixed; mix samples of one batch")
    if any(other is not first and other.others for other in origins):
        raise UsageError(
            "rows of several batches cannot be combined, because the model takes other inputs with "
            "them; combine rows of one batch"
        )
    return first
