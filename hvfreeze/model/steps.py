"""A forward pass as steps with one input tensor and one output tensor, and schemes that group steps into blocks.

A step never changes its input: an in-place activation is part of the step that computes its input. So a tensor between
two steps may be stored, for example in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hvfreeze.errors import UsageError

Call = Callable[[Tensor], Tensor]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that do not begin a step."""


@dataclass(frozen=True)
class Step:
    """A part of a forward pass that takes one tensor, does not change it, and returns one.

    Attributes:
        name: a module of the model, as in `model.named_modules()`, which may be used as a block name.
        calls: the modules and functions of this step, in order.
        owns: the names of the modules, and of parameters outside them, that belong to the block with this step.
        parts: the same computation in finer steps, if any, for a block that starts inside this step.
    """

    name: str
    calls: tuple[Call, ...]
    owns: tuple[str, ...]
    parts: tuple[Step, ...] = ()

    @property
    def leaves(self) -> tuple[Step, ...]:
        """The finest steps inside this one, in forward order."""
        return sum((part.leaves for part in self.parts), ()) if self.parts else (self,)

    def followed_by(self, call: Call, *owns: str) -> Step:
        """Return this step joined with a later call, as one step that cannot be divided."""
        return Step(self.name, (*self.calls, call), (*self.owns, *owns))


@dataclass(frozen=True)
class Layout:
    """A model's steps and the schemes that group them into blocks.

    Attributes:
        steps: the whole forward pass.
        schemes: the blocks of each scheme in forward order, as block name -> name of its first finest step.
        verified: whether the steps equal the model's forward pass by construction.
        tied: names of parameters that the first and the last step share.
    """

    steps: tuple[Step, ...]
    schemes: Mapping[str, Mapping[str, str]]
    verified: bool
    tied: tuple[str, ...] = ()


def make_step(model: nn.Module, *calls: str | Call, name: str = "", owns: Iterable[str] = ()) -> Step:
    """Return a step of modules (by name) and functions, named after its first module."""
    modules = tuple(call for call in calls if isinstance(call, str))
    run = tuple(model.get_submodule(call) if isinstance(call, str) else call for call in calls)
    return Step(name or modules[0], run, (*modules, *owns))


def split_step(model: nn.Module, name: str, *, layers: str = "") -> Step:
    """Return module `name` as one step that can be divided into its children, or the children of its `layers`."""
    inner = f"{name}.{layers}" if layers else name
    children = model.get_submodule(inner)._modules
    return replace(make_step(model, name), parts=tuple(make_step(model, f"{inner}.{child}") for child in children))


def sequence(model: nn.Module, name: str = "") -> list[Step]:
    """Return the children of `name` as steps, in the order of definition.

    BatchNorm and in-place activations join the previous step. A child that is an nn.Sequential of modules of one class
    (a stage) can be divided. A child that occurs twice, such as an activation, is a step each time.
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
    """Return one block per step with parameters, as block name -> name of its first step.

    A step without parameters joins the previous block; a Dropout joins the next one, because it must stay active while
    the next layer is trained.
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
    """Return the children of a module as steps: scheme `stage` has a block per child, `residual` one per finest step.

    Raises:
        UsageError: no child of `model` has parameters.
    """
    steps = sequence(model)
    starts = block_starts(model, steps) if steps else {}
    if not starts:
        raise UsageError(
            f"model ({type(model).__name__}) has no submodule with parameters, so there is nothing to freeze"
        )
    schemes = {"stage": starts, "residual": block_starts(model, [leaf for step in steps for leaf in step.leaves])}
    return Layout(tuple(steps), schemes, verified=type(model) is nn.Sequential and not _shares_dropout(model))


def _shares_dropout(model: nn.Module) -> bool:
    """Return True if a dropout occurs twice: freezing the block of one would disable the other."""
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
    """Return the layout of a classifier with a first block `stem` and a last block `head`.

    Args:
        model: the classifier.
        body: the steps that schemes group in different ways.
        tail: the steps that all schemes group alike: the head, and hidden layers of a classifier.
        stages: the steps of the body that start a block of scheme `stage`, after the stem.
        tail_blocks: the blocks of the tail, block name -> first step; by default one, the head.
        joined: finest steps with parameters that do not start a block of scheme `residual`.
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
