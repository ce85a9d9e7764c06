"""Blocks of a model of one's own, in the order in which its forward pass calls the modules that they start with.

    blocks_of(net, example=images)                       # every part of net that it calls, in this order
    blocks_of(net, scheme="embedding,layers.0,layers.2,head", example=(tokens, mask))
    blocks_of(net, scheme="embedding,layers,head")       # in the order of definition, which nobody has compared

A cut freezes what the first blocks own. The model goes on to run as it is written: its forward pass need not be a
chain, nor take one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvfreeze.chain.blocks import Block, Chain
from hvfreeze.chain.watched.calls import Inputs, watch
from hvfreeze.chain.watched.plan import Plan, as_defined
from hvfreeze.errors import UsageError


@dataclass(frozen=True, eq=False)
class WatchedChain(Chain):
    """A model in blocks that run inside its own forward pass; `run` is refused, see `Passage`.

    Attributes:
        parts: for each block the names of its modules that hold parameters, in the order of their calls.
        taken_apart: the modules that call those parts, the model itself first; they belong to no block.
        loose_buffers: the names of buffers of those.
        example: a batch of inputs that the model was watched with, if any.
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
        """Refuse: these blocks run inside the model's own forward pass only."""
        raise UsageError(
            f"the blocks of {type(self.model).__name__} run inside its own forward pass only; write it out with "
            "Chain.from_modules to run them one by one"
        )


def blocks_of(model: nn.Module, *, scheme: str | None = None, example: Inputs | None = None) -> WatchedChain:
    """Return a model of one's own in blocks.

    Args:
        model: any module.
        scheme: NAME,NAME,...: each names a submodule that starts a block, in forward order; what runs before the first
            is a block too. None: each part that the model calls; a part with more than half of all parameters is
            taken apart, a BatchNorm joins the part before.
        example: a batch of inputs, which the model is run on once, to see what it calls.

    Raises:
        UsageError: there is neither a scheme nor an example, a name is no module or not called in this order, a
            parameter is used by several blocks, or there is nothing to freeze before the last block.
    """
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
            f"{type(model).__name__} is no torchvision classifier: give example=, a batch of its inputs, on which it "
            "is run once to see what it calls in which order, or name its blocks with blocks='NAME,NAME,...'"
        )
    calls = watch(model, example) if example is not None else as_defined(model)
    plan = Plan(model, calls, starts)
    plan.check_order(scheme or "")
    chain = _assemble(plan, known_use=example is not None)
    if len(chain.blocks) < 2:
        raise UsageError(
            f"{type(model).__name__} is a single block ({chain.blocks[0].name}), and the last is never frozen; name "
            "blocks with blocks='NAME,NAME,...'"
        )
    return WatchedChain(**{**vars(chain), "example": example})


def _assemble(plan: Plan, *, known_use: bool) -> WatchedChain:
    model, groups = plan.model, plan.groups()
    block_of = {part: block for block, (_, parts) in enumerate(groups) for part in parts}
    loose = [name for name, _ in model.named_parameters() if _owner(name, block_of) is None]
    used = _first_uses(plan, loose, block_of) if known_use and loose else {}
    names: list[list[str]] = [[] for _ in groups]
    buffers: list[list[str]] = [[] for _ in groups]
    loose_buffers, before = [], 0
    claimed: dict[int, tuple[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = _owner(name, block_of)
        block = owner if owner is not None else used.get(name, len(groups) - 1 if known_use else before)
        before = block
        if id(parameter) not in claimed:
            names[block].append(name)
        elif claimed[id(parameter)][0] != block:
            first, known = claimed[id(parameter)]
            raise UsageError(
                f"parameter {known}, also called {name}, is used by block {groups[first][0]} and by block "
                f"{groups[block][0]}: name blocks so that one holds both"
            )
        claimed.setdefault(id(parameter), (block, name))
    for name, _ in model.named_buffers():
        owner = _owner(name, block_of)
        loose_buffers += [name] if owner is None else []
        buffers[len(groups) - 1 if owner is None else owner].append(name)
    modules = _modules(plan, block_of, len(groups))
    blocks = tuple(
        Block(
            name,
            tuple(model.get_submodule(part) for part in parts),
            tuple(modules[block]),
            tuple(names[block]),
            tuple(buffers[block]),
        )
        for block, (name, parts) in enumerate(groups)
    )
    return WatchedChain(
        model, blocks, tuple(tuple(parts) for _, parts in groups), tuple(plan.taken_apart), tuple(loose_buffers)
    )


def _owner(name: str, block_of: dict[str, int]) -> int | None:
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in block_of:
            return block_of[path]
    return None


def _modules(plan: Plan, block_of: dict[str, int], count: int) -> list[list[nn.Module]]:
    """Return each block's modules; one without parameters belongs to the part that is called next, once.

    So a dropout stays active as long as what it feeds is trained.
    """
    modules: list[list[nn.Module]] = [[] for _ in range(count)]
    for name, module in plan.model.named_modules():
        owner = block_of.get(name, _owner(name, block_of))
        if owner is not None:
            modules[owner].append(module)
    waiting: list[str] = []
    times = [made.name for made in plan.calls]
    for made in plan.calls:
        if made.name in block_of:
            modules[block_of[made.name]] += [plan.model.get_submodule(name) for name in waiting]
            waiting = []
        elif _owner(made.name, block_of) is None and made.name not in plan.taken_apart and times.count(made.name) == 1:
            waiting.append(made.name)
    return modules


def _first_uses(plan: Plan, loose: Sequence[str], block_of: dict[str, int]) -> dict[str, int]:
    """Return for each of these parameters the first block whose output depends on it, where there is one."""
    found: dict[str, int] = {}
    waiting = {name: plan.model.get_parameter(name) for name in loose}
    waiting = {name: parameter for name, parameter in waiting.items() if parameter.requires_grad}
    for made in sorted((m for m in plan.calls if m.name in block_of), key=lambda m: block_of[m.name]):
        tensors = [t for t in torch.utils._pytree.tree_leaves(made.output) if isinstance(t, Tensor) and t.requires_grad]
        if tensors and waiting:
            total = sum(tensor.sum() for tensor in tensors)
            assert isinstance(total, Tensor)
            gradients = torch.autograd.grad(total, list(waiting.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(list(waiting), gradients):
                if gradient is not None:
                    found[name] = block_of[made.name]
                    del waiting[name]
    return found
