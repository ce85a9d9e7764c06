"""Divide the forward pass of a custom module into steps with torch.fx, if it does more than run its children.

An example is `self.fc(F.relu(self.conv(x)).flatten(1))`. The forward pass is traced once with symbolic images. A step
ends where the rest depends on a single tensor with a row per image, so a residual connection is inside a step.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node, Tracer
from torch.fx.node import map_aggregate
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.steps import BATCH_NORMS, Call, Layout, Step, block_starts

OUTSIDE = (operator.getitem, getattr)
"""Functions that take a tensor out of a tuple or the like, which must not be between two steps."""
DROPOUTS: dict[type[Any], Call] = {
    nn.Dropout: functional.dropout,
    nn.Dropout1d: functional.dropout1d,
    nn.Dropout2d: functional.dropout2d,
    nn.Dropout3d: functional.dropout3d,
    nn.AlphaDropout: functional.alpha_dropout,
}


def forward_layout(model: nn.Module, example: Tensor) -> Layout:
    """Return the steps of a module's forward pass: scheme `stage` has a block per child, `residual` one per finest
    step.

    Raises:
        UsageError: the forward pass cannot be traced, fails on `example`, (N, ...), or has no module with parameters.
    """
    coarse = _steps_of(model, Whole(), example)
    steps = coarse if len(block_starts(model, coarse)) > 1 else _steps_of(model, Tracer(), example)
    finest = block_starts(model, steps)
    return Layout(tuple(steps), {"stage": _by_child(finest), "residual": finest}, verified=False)


def used_last(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules inside the last called module with parameters, without BatchNorm.

    Empty if the forward pass uses a parameter directly after it; None if it cannot be traced.
    """
    try:
        with in_evaluation(model):
            graph = Whole().trace(model)
    except Exception:  # the user's module may fail in any way
        return None
    outside = dict(model.named_parameters())
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and node.target in outside:
            return []
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            if not isinstance(module, BATCH_NORMS) and any(True for _ in module.parameters()):
                return list(module.modules())
    return None


class Whole(Tracer):
    """A tracer that follows a module's own forward pass and keeps the called modules whole, except sequences."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True if a module is a single operation."""
        return type(m) is not nn.Sequential


class Rows(Interpreter):
    """An interpreter that runs a graph and records the operations whose result has a row per image."""

    def __init__(self, model: nn.Module, graph: Graph, images: int) -> None:
        super().__init__(model, graph=graph)
        self.images = images
        self.kept = set[Node]()

    def run_node(self, n: Node) -> Any:
        """Run an operation and return its result."""
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.shape[:1] == (self.images,):
            self.kept.add(n)
        return value


def _steps_of(model: nn.Module, tracer: Tracer, example: Tensor) -> list[Step]:
    try:
        with in_evaluation(model), torch.no_grad():
            graph = tracer.trace(model)
            # More images than the usual two, to distinguish them from a dimension of two, as of stacked branches.
            images = torch.cat([example] * 3)
            rows = Rows(model, graph, len(images))
            rows.run(images)
    except Exception as error:  # the user's module may fail in any way
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"model ({type(model).__name__}): torch.fx cannot trace its forward pass ({reason}), which "
            f"does more than run its children in the order of definition; write its blocks out with "
            f"Chain.from_modules"
        ) from error
    try:
        return _joined(list(_parts(model, list(_segments(graph, rows.kept)))))
    except UsageError as error:
        raise UsageError(f"model ({type(model).__name__}): its forward pass {error}") from error


def _segments(graph: Graph, kept: set[Node]) -> Iterator[list[Node]]:
    """Yield the operations of each step. Consecutive steps share one value, the last result of the former.

    That value is in `kept`.
    """
    _name_changed(graph)
    images, *others = [node for node in graph.nodes if node.op == "placeholder"]
    if any(not node.args for node in others if node.users):
        raise UsageError(f"takes {others[0].name} in addition to the images; give it a default or remove it")
    nodes = [node for node in graph.nodes if node.op not in {"placeholder", "get_attr"}]
    [result] = nodes.pop().args
    if not isinstance(result, Node):
        raise UsageError(
            "returns more than a tensor of logits; return the logits alone, and compute losses in your training script"
        )
    nodes = _needed(nodes, result)
    last_use = {used: place for place, node in enumerate(nodes) for used in node.all_input_nodes}
    last_use[result] = len(nodes)
    # Every value has the batch size of the images, so any value can provide it.
    last_use = {node: place for node, place in last_use.items() if not _is_batch_size(node)}
    segment: list[Node] = []
    alive = {images}
    for place, node in enumerate(nodes):
        segment.append(node)
        alive = {each for each in alive | {node} if last_use.get(each, -1) > place}
        if (
            alive == {node}
            and (node in kept or node is result)
            and not any(user.target in OUTSIDE for user in node.users)
        ):
            yield segment
            segment = []
    if segment:
        raise UsageError("calls modules after the logits without using their results; remove these calls")


def _name_changed(graph: Graph) -> None:
    """Make later uses of a value depend on the operations that changed it in place."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node, place in places.items():
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        changes = node.op in {"call_method", "call_function"} and name.endswith("_") and not name.endswith("__")
        if (changes or node.kwargs.get("inplace") is True) and node.args and isinstance(node.args[0], Node):
            later = {user for user in node.args[0].users if places[user] > place}
            node.args[0].replace_all_uses_with(node, delete_user_cb=later.__contains__)


def _needed(nodes: Sequence[Node], result: Node) -> list[Node]:
    """Return the operations that the result depends on, and all called modules, in order."""
    found: list[Node] = []
    needed = {result}
    for node in reversed(nodes):
        if node in needed or node.op == "call_module":
            needed.update(node.all_input_nodes)
            found.append(node)
    return found[::-1]


def _is_batch_size(node: Node) -> bool:
    """Return True if a value is `x.size(0)`, `x.shape[0]`, or the shape that the number is taken from."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,) or (len(node.args) == 1 and all(map(_is_batch_size, node.users)))
    if node.op == "call_function" and node.target is getattr:
        return node.args[1:] == ("shape",) and all(map(_is_batch_size, node.users))
    if node.op == "call_function" and node.target is operator.getitem:
        sizes = node.args[0]
        of_sizes = isinstance(sizes, Node) and (sizes.target == "size" or sizes.args[1:] == ("shape",))
        return of_sizes and node.args[1:] == (0,)
    return False


class Part(NamedTuple):
    """The computation of a segment, and its modules and parameters."""

    call: Call
    owns: tuple[str, ...]
    """Names of its modules and parameters."""
    begins: bool
    """Whether it may begin a step."""
    waits: bool = False
    """Whether it belongs to the next step; see `steps.block_starts`."""


def _parts(model: nn.Module, segments: Sequence[Sequence[Node]]) -> Iterator[Part]:
    called = [[str(node.target) for node in nodes if node.op == "call_module"] for nodes in segments]
    times = Counter(name for names in called for name in names)
    if not times:
        raise UsageError("calls no module, so there is nothing to freeze")
    begun = set[str]()
    for number, nodes in enumerate(segments):
        # A dropout belongs to the next step, else to the previous one.
        around = [name for names in (*called[number:], *called[:number][::-1]) for name in names]
        near = min(around, key=lambda name: times[name] > 1)
        part = _part(model, nodes, near, repeated={name for name in called[number] if times[name] > 1})
        # Steps have different names.
        yield part._replace(begins=part.begins and part.owns[0] not in begun)
        begun.update(called[number])


def _part(model: nn.Module, nodes: Sequence[Node], near: str, repeated: set[str]) -> Part:
    """Return the computation of a segment. Functions like `F.dropout` take the mode of the module `near`.

    So do dropouts in `repeated`, which are called in several places.
    """
    modules = tuple(str(node.target) for node in nodes if node.op == "call_module")
    used = [node for each in nodes for node in each.all_input_nodes if node.op == "get_attr"]
    called = [model.get_submodule(name) for name in modules]
    trains = any(True for module in called if not isinstance(module, BATCH_NORMS) for _ in module.parameters())
    drops = any(map(_drops, nodes)) or any(type(module) in DROPOUTS for module in called)
    dropped = [name for name in modules if name in repeated and type(model.get_submodule(name)) in DROPOUTS]
    owns = (*(name for name in modules if name not in dropped), *dict.fromkeys(str(node.target) for node in used))
    alone = len(nodes) == 1 and bool(called) and len(nodes[0].args) == 1 and not nodes[0].kwargs and not dropped
    call = called[0] if alone else partial(compute, tuple(_operations(model, nodes, near, dropped)))
    return Part(call, owns, begins=trains, waits=drops and not trains)


def _drops(node: Node) -> bool:
    """Return True if an operation is a function like `F.dropout`, with an argument for training mode."""
    return (
        node.op == "call_function" and "dropout" in getattr(node.target, "__name__", "") and "training" in node.kwargs
    )


def _joined(parts: Sequence[Part]) -> list[Step]:
    """Join parts to steps that each begin with a module; functions belong to the previous step."""
    steps: list[Step] = []
    waiting: list[Part] = []
    for part in parts:
        if part.begins:
            all_parts = [*waiting, part]
            owns = tuple(own for each in all_parts for own in each.owns)
            steps.append(Step(part.owns[0], tuple(each.call for each in all_parts), owns))
            waiting = []
        elif waiting or part.waits or not steps:
            waiting.append(part)
        else:
            steps.append(steps.pop().followed_by(part.call, *part.owns))
    for part in waiting:
        steps.append(steps.pop().followed_by(part.call, *part.owns))
    return steps


def _by_child(finest: dict[str, str]) -> dict[str, str]:
    """Return the first step of a block per child of the innermost module that holds all blocks."""
    names = [name.split(".") for name in finest]
    depth = 0
    while min(len(name) for name in names) > depth + 1 and len({name[depth] for name in names}) == 1:
        depth += 1
    blocks: dict[str, str] = {}
    before = ""
    for name, start in finest.items():
        child = ".".join(name.split(".")[: depth + 1])
        if child != before:
            # A child that is called in two places has two blocks.
            blocks[name if child in blocks else child] = start
        before = child
    return blocks


class Read(partial[Any]):
    """Placeholder in an argument for a value at the time of the call: a function of the segment's results so far."""


def _result(number: int, results: Sequence[Any]) -> Any:
    """Return a result of the segment; 0 is its input."""
    return results[number]


def _batch_size(results: Sequence[Any]) -> int:
    return len(results[0])


def _attribute(module: nn.Module, name: str, _: Sequence[Any]) -> Any:
    """Return a module's parameter, buffer or mode."""
    return getattr(module, name)


class Operation(NamedTuple):
    """A call of a function or of a method."""

    target: Any
    args: Any
    kwargs: Any


def _operations(model: nn.Module, nodes: Sequence[Node], near: str, dropped: Sequence[str]) -> Iterator[Operation]:
    numbers: dict[Node, int] = {}

    def placeholder(argument: Any) -> Any:
        if not isinstance(argument, Node):
            return argument
        if argument.op == "get_attr":
            owner, _, name = str(argument.target).rpartition(".")
            return Read(_attribute, model.get_submodule(owner), name)
        if argument.op == "placeholder" and argument.args:
            return argument.args[0]
        if argument not in numbers and _is_batch_size(argument):
            return Read(_batch_size)
        return Read(_result, numbers.get(argument, 0))

    mode: dict[str, Any] = {"training": Read(_attribute, model.get_submodule(near), "training")}
    for number, node in enumerate(nodes, 1):
        target: Any = node.target
        args: Any = map_aggregate(node.args, placeholder)
        kwargs: Any = map_aggregate(node.kwargs, placeholder)
        if node.op == "call_module":
            target = model.get_submodule(str(node.target))
            if node.target in dropped:
                target, kwargs = DROPOUTS[type(target)], {"p": target.p, **mode, "inplace": target.inplace}
        elif _drops(node):
            kwargs = {**kwargs, **mode}
        yield Operation(target, args, kwargs)
        numbers[node] = number


def compute(operations: Sequence[Operation], x: Tensor) -> Any:
    """Run operations on `x` and return the last result."""
    results = [x]

    def read(argument: Any) -> Any:
        return argument(results) if isinstance(argument, Read) else argument

    for target, args, kwargs in operations:
        given, named = map_aggregate(args, read), map_aggregate(kwargs, read)
        if isinstance(target, str):
            results.append(getattr(given[0], target)(*given[1:], **named))
        else:
            results.append(target(*given, **named))
    return results[-1]
