"""A forward pass written as steps, one tensor in and one tensor out, and the ways of grouping steps into blocks.

A step never changes the tensor that it is given: an activation that works in place is kept in the step that makes its
input. So a tensor between two steps may be kept by anybody, for example in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hvfreeze.errors import UsageError

Call = Callable[[Tensor], Tensor]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that begin no step."""


@dataclass(frozen=True)
class Step:
    """A part of a forward pass that takes one tensor, leaves it as it is, and gives one back.

    Attributes:
        name: a module of the model, as in `model.named_modules()`; it is what a list of block names may say.
        calls: the modules and functions of this step, run one after another.
        owns: the names of the modules, and of parameters outside them, that belong to the block with this step.
        parts: the same computation in finer steps, where there are any; used when a block starts inside this step.
    """

    name: str
    calls: tuple[Call, ...]
    owns: tuple[str, ...]
    parts: tuple[Step, ...] = ()

    @property
    def leaves(self) -> tuple[Step, ...]:
        """The finest steps of this one, in forward order."""
        return sum((part.leaves for part in self.parts), ()) if self.parts else (self,)

    def followed_by(self, call: Call, *owns: str) -> Step:
        """Return this step and a call behind it as one, which cannot be divided."""
        return Step(self.name, (*self.calls, call), (*self.owns, *owns))


@dataclass(frozen=True)
class Layout:
    """A model's steps and its named ways of grouping them.

    Attributes:
        steps: the whole forward pass.
        schemes: for each scheme its blocks in forward order, block name -> name of the finest step that it starts with.
        verified: whether the steps are the model's forward pass by construction.
        tied: parameters of the first step that the last one uses too, by name.
    """

    steps: tuple[Step, ...]
    schemes: Mapping[str, Mapping[str, str]]
    verified: bool
    tied: tuple[str, ...] = ()


def make_step(model: nn.Module, *calls: str | Call, name: str = "", owns: Iterable[str] = ()) -> Step:
    """Return a step of modules (given by name) and functions; its name is that of its first module."""
    modules = tuple(call for call in calls if isinstance(call, str))
    run = tuple(model.get_submodule(call) if isinstance(call, str) else call for call in calls)
    return Step(name or modules[0], run, (*modules, *owns))


def split_step(model: nn.Module, name: str, *, layers: str = "") -> Step:
    """Return module `name` as one step that can also be run child by child (the children of its `layers`, if given)."""
    inner = f"{name}.{layers}" if layers else name
    children = model.get_submodule(inner)._modules
    return replace(make_step(model, name), parts=tuple(make_step(model, f"{inner}.{child}") for child in children))


def sequence(model: nn.Module, name: str = "") -> list[Step]:
    """Return the children of `name` as steps, in the order in which they were defined.

    BatchNorm and activations that work in place join the step before. A child that is an nn.Sequential of modules of
    one class (a stage) can be split. A child that is there twice, as an activation may be, is a step each time.
    """
    steps: list[Step] = []
    for child, module in model.get_submodule(name)._modules.items():
        if module is None:
            continue
        path = f"{name}.{child}" if name else child
        if steps and (isinstance(module, BATCH_NORMS) or getattr(module, "inplace", False)):
            steps.append(steps.pop().followed_by(module, path))
        elif type(module) is nn.Sequential and len(module) > 1 and len({type(inner) for inner in module}) == 1:
            steps.append(split_step(model, path))
        else:
            steps.append(make_step(model, path))
    return steps


def block_starts(model: nn.Module, steps: Sequence[Step]) -> dict[str, str]:
    """Return one block for each step with parameters, block name -> name of its first step.

    A step without parameters joins the block before, except that a Dropout joins the block after it: it must stay
    active as long as the layer that it feeds is trained.
    """
    starts: dict[str, str] = {}
    waiting = steps[0].leaves[0].name
    for step in steps:
        first = step.leaves[0].name
        if _has_parameters(model, step):
            starts[step.name] = waiting or first
            waiting = ""
        elif isinstance(step.calls[-1], nn.Dropout):
            waiting = waiting or first
    return starts


def _has_parameters(model: nn.Module, step: Step) -> bool:
    return any(name == own or name.startswith(f"{own}.") for name, _ in model.named_parameters() for own in step.owns)


def children_layout(model: nn.Module) -> Layout:
    """Return the children of any module as steps: `stage` has a block a child, `residual` a block a finest step.

    Raises:
        UsageError: no child of `model` has parameters.
    """
    steps = sequence(model)
    starts = block_starts(model, steps) if steps else {}
    if not starts:
        raise UsageError(f"model ({type(model).__name__}) has no submodule with parameters: there is nothing to freeze")
    schemes = {"stage": starts, "residual": block_starts(model, [leaf for step in steps for leaf in step.leaves])}
    return Layout(tuple(steps), schemes, verified=type(model) is nn.Sequential and not _shares_dropout(model))


def _shares_dropout(model: nn.Module) -> bool:
    """Tell whether a dropout is there twice: with the block of one place frozen, it would be off in the other too."""
    dropouts = [m for _, m in model.named_modules(remove_duplicate=False) if isinstance(m, _DropoutNd)]
    return len(set(dropouts)) < len(dropouts)


def classifier_layout(
    model: nn.Module,
    body: Sequence[Step],
    tail: Sequence[Step],
    *,
    stages: Iterable[str],
    tail_blocks: Mapping[str, str] | None = None,
    joined: Iterable[str] = (),
) -> Layout:
    """Return the layout of a classifier, whose first block is called stem and whose last is the head.

    Args:
        model: the classifier.
        body: the steps that may be grouped in several ways.
        tail: the steps that are grouped in one way only: the head, and hidden layers of a classifier.
        stages: the steps of the body that start a block of scheme `stage`, after the stem.
        tail_blocks: the blocks of the tail, block name -> first step; by default one, the head.
        joined: finest steps that have parameters and yet start no block of scheme `residual`.
    """
    last = dict(tail_blocks or {"head": tail[0].name})
    leaves = [leaf for step in body for leaf in step.leaves]
    stem = leaves[0].name
    finest = {name: start for name, start in block_starts(model, leaves).items() if name not in {stem, *joined}}
    first = {step.name: step.leaves[0].name for step in body}
    schemes = {
        "stage": {"stem": stem, **{name: first.get(name, name) for name in stages}, **last},
        "residual": {"stem": stem, **finest, **last},
    }
    return Layout((*body, *tail), schemes, verified=True)
