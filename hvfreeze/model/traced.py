"""Divide any module into blocks: as a chain if possible, else by tracing the calls of its forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import (
    Block,
    Chain,
    IndivisibleError,
    Ownership,
    containers,
    cut_by,
    cut_into_blocks,
    make_blocks,
)
from hvfreeze.model.families import layout_of
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.steps import Layout

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""A batch of a model's inputs: a tensor, a tuple for `model(*inputs)` or a dict for `model(**inputs)`."""


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Attributes:
        name: name of the submodule, as in `model.named_modules()`.
        parent: the submodule that called it, "" for the model itself.
        graph: gradient nodes of its output tensors.
    """

    name: str
    parent: str
    graph: tuple[Any, ...] = ()


class Watch:
    """Records the calls of a model's submodules, in the order in which they end, until it is closed.

    Attributes:
        calls: the finished calls.
        active: names of the running submodules, callers first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.active: list[str] = []
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if name:
                self._hooks += [
                    module.register_forward_pre_hook(self._entering(name)),
                    module.register_forward_hook(self._leaving()),
                ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Any:
        return lambda module, inputs: self.active.append(name)

    def _leaving(self) -> Any:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            name = self.active.pop()
            leaves = torch.utils._pytree.tree_leaves(output)
            # Not the tensors themselves, which would keep their memory until the pass ends.
            graph = tuple(leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
            self.calls.append(Call(name, self.active[-1] if self.active else "", graph))

        return leave


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of `model` for a batch of its inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def watch(model: nn.Module, example: Inputs) -> list[Call]:
    """Trace the calls of `model`'s submodules for a batch of its inputs; return them in the order in which they ended.

    The model runs once, in evaluation mode and with gradients; modes, buffers and random state are unchanged.

    Raises:
        UsageError: the model cannot run on `example`.
    """
    seen = Watch(model)
    try:
        with in_evaluation(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
            call(model, example)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise UsageError(
            f"example: {type(model).__name__} cannot run on it ({error}); give a batch of its inputs, as a tensor, a "
            "tuple for model(*inputs) or a dict for model(**inputs)"
        ) from error
    finally:
        seen.close()
    return seen.calls


LARGEST_SHARE = 0.5
"""Share of the model's parameters above which a part is divided further, if it has parts."""
CONTAINERS = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)
"""Container classes of torch.nn; every other class of torch.nn is a single layer."""


def as_defined(model: nn.Module) -> list[Call]:
    """Return a call of each submodule in the order of definition, each called by its parent module."""
    lists = {name for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))}

    def parent_of(name: str) -> str:
        parent = name.rpartition(".")[0]
        return parent_of(parent) if parent in lists else parent

    return [Call(name, parent_of(name)) for name, _ in model.named_modules() if name and name not in lists]


@dataclass
class BlockPlan:
    """The plan for dividing a model: its parts in forward order, and the first part of each block."""

    model: nn.Module
    calls: Sequence[Call]
    starts: Sequence[str]
    parts: list[str] = field(default_factory=list)
    taken_apart: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in self.model.named_modules()}
        self._inside: dict[str, list[str]] = {}
        parents = {made.name: made.parent for made in reversed(self.calls)}
        for name in dict.fromkeys(made.name for made in self.calls):
            self._inside.setdefault(parents[name], []).append(name)
        self._visit("")

    def _visit(self, name: str) -> None:
        self.taken_apart.append(name)
        for child in self._inside.get(name, []):
            if self._sizes[child] and child not in (*self.parts, *self.taken_apart):
                if self._is_divided(child):
                    self._visit(child)
                else:
                    self.parts.append(child)

    def _is_divided(self, name: str) -> bool:
        held = [child for child in self._inside.get(name, []) if self._sizes[child]]
        if self.starts:
            return bool(held) and any(start.startswith(f"{name}.") for start in self.starts)
        module = self.model.get_submodule(name)
        is_made_of_parts = isinstance(module, CONTAINERS) or not type(module).__module__.startswith("torch.nn.")
        return is_made_of_parts and len(held) > 1 and self._sizes[name] > LARGEST_SHARE * self._sizes[""]

    def check_order(self) -> None:
        """Raise UsageError if a name starts no part, or names are not in forward order."""
        scheme, reached = ",".join(self.starts), -1
        for name in self.starts:
            inside = [place for place, part in enumerate(self.parts) if part == name or part.startswith(f"{name}.")]
            if not inside:
                raise UsageError(f"blocks ({scheme}): {name} holds no parameter, or the forward pass does not call it")
            if inside[0] <= reached:
                raise UsageError(
                    f"blocks ({scheme}): {name} does not run after the previous name; list names in "
                    f"forward order (without example=, the order of definition)"
                )
            reached = inside[0]

    def groups(self) -> list[tuple[str, list[str]]]:
        """Return the name and the parts of each block, in forward order; repeated parts are in one block."""
        groups: list[tuple[str, list[str]]] = []
        opened: set[str] = set()
        for part in self.parts:
            name = next((s for s in self.starts if (part == s or part.startswith(f"{s}.")) and s not in opened), None)
            joins = isinstance(self.model.get_submodule(part), _BatchNorm)
            if not groups or name is not None or (not self.starts and not joins):
                opened |= {name} if name is not None else set()
                groups.append((name or part, []))
            groups[-1][1].append(part)
        return self._joined_where_called_again(groups)

    def _joined_where_called_again(self, groups: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        block_of = {part: block for block, (_, parts) in enumerate(groups) for part in parts}
        reached, last = 0, dict[int, int]()
        for made in self.calls:
            if made.name in block_of:
                reached = max(reached, block_of[made.name])
                last[block_of[made.name]] = reached
        joined: list[tuple[str, list[str]]] = []
        until = -1
        for block, (name, parts) in enumerate(groups):
            if joined and block <= until:
                joined[-1][1].extend(parts)
            else:
                joined.append((name, list(parts)))
            until = max(until, last.get(block, block))
        return joined


@dataclass(frozen=True, eq=False)
class TracedChain(Chain):
    """A model in blocks that only run inside its own forward pass; `run` raises, see `SplitForward`.

    Attributes:
        parts: for each block the names of its modules with parameters, in the order of their calls.
        taken_apart: the modules that call these parts, the model itself first; they belong to no block.
        loose_buffers: names of the buffers of `taken_apart`.
        example: the batch of inputs for the trace, if any.
    """

    parts: tuple[tuple[str, ...], ...] = ()
    taken_apart: tuple[str, ...] = ("",)
    loose_buffers: tuple[str, ...] = ()
    example: Inputs | None = None

    @property
    def containers(self) -> tuple[nn.Module, ...]:
        """The modules that call the blocks' parts, the model itself first."""
        return tuple(self.model.get_submodule(name) for name in self.taken_apart)

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Raise UsageError: these blocks only run inside the model's own forward pass."""
        raise UsageError(
            f"the blocks of {type(self.model).__name__} only run inside its own forward pass; write it "
            f"out with Chain.from_modules to run them one by one"
        )


def blocks_of(model: nn.Module, *, scheme: str | None = None, example: Inputs | None = None) -> TracedChain:
    """Divide a custom model into blocks."""
    starts = [name.strip() for name in scheme.split(",")] if scheme is not None else []
    known = dict(model.named_modules())
    for name in starts:
        if not name or name not in known:
            shown = ", ".join(name for name, _ in model.named_children())
            raise UsageError(
                f"blocks ({scheme}): there is no module '{name}'; name some in forward order: {shown}, ..."
            )
    if example is None and not starts:
        raise UsageError(
            f"{type(model).__name__} is not a torchvision classifier; give a batch of its inputs as "
            f"example= to trace its calls, or name its blocks with blocks='NAME,NAME,...'"
        )
    calls = watch(model, example) if example is not None else as_defined(model)
    chain = blocks_from(model, calls, starts, known_use=example is not None)
    return TracedChain(**{**vars(chain), "example": example})


def blocks_from(model: nn.Module, calls: Sequence[Call], starts: Sequence[str] = (), *, known_use: bool) -> TracedChain:
    """Divide a model into blocks by its calls.

    Args:
        model: any module.
        calls: calls of its submodules in one forward pass.
        starts: submodules that start a block; empty to choose them from the calls.
        known_use: whether the calls show which block uses a parameter outside submodules.

    Raises:
        UsageError: the names in `starts` are not in forward order.
        IndivisibleError: there are no two blocks, or a parameter is used by two of them.
    """
    plan = BlockPlan(model, calls, starts)
    plan.check_order()
    chain = _assemble(plan, known_use=known_use) if plan.parts else undivided(model)
    if len(chain.blocks) < 2:
        raise IndivisibleError(
            f"{type(model).__name__} is a single block ({chain.blocks[0].name}), and the last block is "
            f"never frozen; name blocks with blocks='NAME,NAME,...'"
        )
    return chain


def undivided(model: nn.Module) -> TracedChain:
    """Return a model as one block, which is never frozen."""
    parameters = tuple(name for name, _ in model.named_parameters())
    buffers = tuple(name for name, _ in model.named_buffers())
    block = Block(type(model).__name__, (model,), tuple(model.modules()), parameters, buffers)
    return TracedChain(model, (block,), parts=((),))


def describe_blocks(chain: TracedChain) -> dict[str, Any]:
    """Describe blocks by names, for other ranks and for a later run of the same script."""
    names = {id(module): name for name, module in chain.model.named_modules()}
    return {
        "blocks": [
            {
                "name": block.name,
                "parts": list(parts),
                "modules": [names[id(module)] for module in block.modules],
                "parameters": list(block.parameter_names),
                "buffers": list(block.buffer_names),
            }
            for block, parts in zip(chain.blocks, chain.parts, strict=True)
        ],
        "taken_apart": list(chain.taken_apart),
        "loose_buffers": list(chain.loose_buffers),
    }


def from_description(model: nn.Module, description: Mapping[str, Any]) -> TracedChain:
    """Divide `model` into the blocks of a description by `describe_blocks`.

    Raises:
        UsageError: the model has other parameters, buffers or modules.
    """
    entries = description["blocks"]
    for what, have in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        if sorted(name for entry in entries for name in entry[what]) != sorted(name for name, _ in have):
            raise UsageError(f"the blocks were found in a model with other {what} than this {type(model).__name__}")
    blocks = tuple(
        Block(
            entry["name"],
            tuple(model.get_submodule(part) for part in entry["parts"]),
            tuple(model.get_submodule(name) for name in entry["modules"]),
            tuple(entry["parameters"]),
            tuple(entry["buffers"]),
        )
        for entry in entries
    )
    return TracedChain(
        model,
        blocks,
        parts=tuple(tuple(entry["parts"]) for entry in entries),
        taken_apart=tuple(description["taken_apart"]),
        loose_buffers=tuple(description["loose_buffers"]),
    )


def _assemble(plan: BlockPlan, *, known_use: bool) -> TracedChain:
    model, groups = plan.model, plan.groups()
    block_of = {part: block for block, (_, parts) in enumerate(groups) for part in parts}
    owns = [[*parts, *fed] for (_, parts), fed in zip(groups, _feeding(plan, block_of, len(groups)), strict=True)]
    loose = [name for name, _ in model.named_parameters() if _owner(name, block_of) is None]
    used = _first_uses(plan, loose, block_of) if known_use and loose else {}
    before = 0
    for name, _ in model.named_parameters():
        owner = _owner(name, block_of)
        before = owner if owner is not None else used.get(name, len(groups) - 1 if known_use else before)
        owns[before] += [name] if owner is None else []
    loose_buffers = [name for name, _ in model.named_buffers() if _owner(name, block_of) is None]
    owns[-1] += loose_buffers
    calls = [(name, tuple(map(model.get_submodule, parts))) for name, parts in groups]
    # A module that occurs twice, such as rotary positions, may give two blocks the same buffer.
    buffers = model.named_buffers()
    blocks = make_blocks(model, calls, Ownership(owns), buffers=buffers, without=plan.taken_apart)
    return TracedChain(
        model,
        blocks,
        parts=tuple(tuple(parts) for _, parts in groups),
        taken_apart=tuple(plan.taken_apart),
        loose_buffers=tuple(loose_buffers),
    )


def _owner(name: str, block_of: Mapping[str, int]) -> int | None:
    """Return the block of the part that holds `name`; None if no part does."""
    return next((block_of[path] for path in containers(name) if path in block_of), None)


def _feeding(plan: BlockPlan, block_of: Mapping[str, int], count: int) -> list[list[str]]:
    """Return for each block the modules without parameters that are called once, right before its parts.

    So a dropout stays active while the next layer is trained.
    """
    feeding: list[list[str]] = [[] for _ in range(count)]
    waiting: list[str] = []
    times = Counter(made.name for made in plan.calls)
    for made in plan.calls:
        if made.name in block_of:
            feeding[block_of[made.name]] += waiting
            waiting = []
        elif _owner(made.name, block_of) is None and made.name not in plan.taken_apart and times[made.name] == 1:
            waiting.append(made.name)
    return feeding


def _first_uses(plan: BlockPlan, loose: Sequence[str], block_of: dict[str, int]) -> dict[str, int]:
    """Return the first block whose output depends on each of these parameters, if any."""
    found: dict[str, int] = {}
    waiting: dict[Any, str] = {plan.model.get_parameter(name): name for name in loose}
    seen: set[Any] = set()
    for made in sorted((m for m in plan.calls if m.name in block_of), key=lambda m: block_of[m.name]):
        ahead = [node for node in made.graph if node not in seen]
        while ahead:
            node = ahead.pop()
            # Leaf nodes of the gradient graph hold their parameters; visiting them computes nothing.
            ends_at = getattr(node, "variable", None)
            if ends_at in waiting:
                found.setdefault(waiting[ends_at], block_of[made.name])
            seen.add(node)
            ahead += [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
    return found


SCHEMES = ("stage", "residual", "paper")


def in_blocks(model: nn.Module, *, blocks: str | Sequence[str] | None = None, example: Inputs | None = None) -> Chain:
    """Divide `model` into blocks: a chain if its parts run in sequence, else a `TracedChain`.

    Args:
        model: any module.
        blocks: `stage` or `residual`, or NAME,NAME,... (or a list of names): submodules that start a block, in forward
            order. None: the stages of a torchvision classifier or an nn.Sequential; for other modules, the parts that
            it calls.
        example: a batch of the model's inputs: a tensor, a tuple for `model(*inputs)` or a dict for `model(**inputs)`.
            Required for other modules unless `blocks` names their blocks. The model runs on it in evaluation mode.

    Raises:
        UsageError: the model cannot be divided like this; see `cut_into_blocks` and `blocks_of`.
    """
    blocks = _scheme_of(blocks)
    layout = _known_layout(model)
    if layout is not None and layout.verified:
        return cut_into_blocks(model, scheme=blocks or "stage")
    if layout is not None and isinstance(example, Tensor):
        try:
            chain = cut_by(layout, model, scheme=blocks or "stage", example=example)
        except UsageError:
            pass  # its forward pass does more than run its children, so it is traced
        else:
            if len(chain.blocks) > 1:
                return chain
    return blocks_of(model, scheme=None if blocks in SCHEMES else blocks, example=example)


def knows_its_order(model: nn.Module) -> bool:
    """Return True if the model's class determines the order of calls, so that no trace is needed."""
    layout = _known_layout(model)
    return layout is not None and layout.verified


def _scheme_of(blocks: str | Sequence[str] | None) -> str | None:
    if blocks is None or isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, Sequence) or not blocks or not all(isinstance(name, str) for name in blocks):
        raise UsageError(f"blocks ({blocks!r}) must be a string, or a list of names of submodules that start a block")
    return ",".join(blocks)


def _known_layout(model: nn.Module) -> Layout | None:
    """Return the layout of `model`; None if it has none, e.g. because of auxiliary heads."""
    try:
        return layout_of(model)
    except UsageError:
        return None
