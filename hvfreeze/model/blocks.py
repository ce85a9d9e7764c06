"""A model as an ordered chain of blocks; a cut k splits it into the frozen prefix (blocks 0..k-1) and the suffix.

    chain = cut_into_blocks(torchvision.models.resnet18())        # stem, layer1, layer2, layer3, layer4, head
    h = chain.prefix(3)(images)                                   # one tensor at every cut
    logits = chain.suffix(3)(h)                                   # the model's output bit for bit; h is unchanged

A custom model whose forward pass torch.fx can trace:

    chain = cut_into_blocks(net, scheme="encoder,classifier", example=images)

Any other custom model, written out with the functions between its modules:

    chain = Chain.from_modules(net, [("encoder", net.encoder), ("head", [net.pool, torch.flatten, net.fc])])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hvfreeze.errors import UsageError
from hvfreeze.model.families import layout_of
from hvfreeze.model.modes import state_kept
from hvfreeze.model.steps import Call, Layout, Step
from hvfreeze.user_code import told

Group = tuple[str, tuple[Step, ...]]
T = TypeVar("T")


def group_steps(layout: Layout, *, scheme: str) -> list[Group]:
    """Group steps into the blocks of `scheme`, in forward order; return names and steps."""
    starts = layout.schemes.get(scheme) or _named_starts(layout, scheme)
    blocks = {leaf: block for block, leaf in starts.items()}
    groups: list[tuple[str, list[Step]]] = []
    for step in _opened(layout.steps, set(blocks)):
        first = step.leaves[0].name
        if first in blocks:
            groups.append((blocks[first], []))
        groups[-1][1].append(step)
    return [(block, tuple(steps)) for block, steps in groups]


class IndivisibleError(UsageError):
    """The model cannot be divided into two blocks."""


class Ownership:
    """Index of the blocks that use a module, a parameter or a buffer, by dotted name.

    `owns` are the names that belong to each block, with all that they contain.
    """

    def __init__(self, owns: Iterable[Iterable[str]]) -> None:
        self._claimed: dict[str, set[int]] = {}
        self._inside: dict[str, set[int]] = {}
        for index, names in enumerate(owns):
            for own in names:
                self._claimed.setdefault(own, set()).add(index)
                for around in containers(own):
                    self._inside.setdefault(around, set()).add(index)

    def blocks_with(self, name: str) -> set[int]:
        """Return the indices of the blocks that own `name`, a module around it, or a part of it."""
        claims = [self._claimed.get(path, set()) for path in (name, *containers(name))]
        return set().union(*claims, self._inside.get(name, set()))


def owners_of(groups: Iterable[Group]) -> Ownership:
    """Return the index of the blocks of these steps."""
    return Ownership([own for step in steps for own in step.owns] for _, steps in groups)


def _check_dropouts(model: nn.Module, owners: Ownership, blocks: Sequence[str]) -> None:
    """Raise UsageError for a dropout in two blocks: freezing one of them would disable it in the other."""
    users: dict[nn.Module, set[int]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _DropoutNd):
            users.setdefault(module, set()).update(owners.blocks_with(name))
            if len(users[module]) > 1:
                shared = " and ".join(blocks[index] for index in sorted(users[module]))
                raise IndivisibleError(
                    f"blocks ({', '.join(blocks)}): the dropout {name} is used by {shared}; use one dropout per block"
                )


def members(tensors: Iterable[tuple[str, Tensor]], owners: Ownership, blocks: Sequence[str]) -> list[list[str]]:
    """Return the names of each block's tensors, in the order of `tensors`; a tensor with two names has the first.

    Raises:
        IndivisibleError: a tensor belongs to no block, or to several.
    """
    found: list[list[str]] = [[] for _ in blocks]
    seen: dict[int, tuple[str, set[int]]] = {}
    for name, tensor in tensors:
        first, known = seen.get(id(tensor), (name, set()))
        users = owners.blocks_with(name) | known
        if not users:
            raise IndivisibleError(
                f"blocks ({', '.join(blocks)}): {name} belongs to no block; name blocks that cover the "
                f"whole model, or list what functions use in owns= of Chain.from_modules"
            )
        if len(users) > 1:
            shared = " and ".join(blocks[index] for index in sorted(users))
            called = name if first == name else f"{first}, also called {name},"
            raise IndivisibleError(
                f"blocks ({', '.join(blocks)}): {called} is used by {shared}; join them into one block"
            )
        if first == name:
            found[min(users)].append(name)
        seen[id(tensor)] = first, users
    return found


def containers(name: str) -> list[str]:
    """Return the names of the modules around a module, a parameter or a buffer, outermost first."""
    return [name[:dot] for dot, letter in enumerate(name) if letter == "."]


def _opened(steps: Iterable[Step], starts: set[str]) -> Iterator[Step]:
    """Yield the steps, split if a block starts inside one."""
    for step in steps:
        if any(leaf.name in starts for leaf in step.leaves[1:]):
            yield from _opened(step.parts, starts)
        else:
            yield step


def _named_starts(layout: Layout, scheme: str) -> Mapping[str, str]:
    """Return the first step of each block, by block name; the steps before the first name are a block too."""
    leaves = [leaf.name for step in layout.steps for leaf in step.leaves]
    starts: dict[str, str] = {}
    reached = -1
    for name in [name.strip() for name in scheme.split(",")]:
        inside = [index for index, leaf in enumerate(leaves) if leaf == name or leaf.startswith(f"{name}.")]
        if not inside:
            raise UsageError(_cannot_start(layout, scheme, name))
        if inside[0] <= reached:
            raise UsageError(
                f"blocks ({scheme}): {name} does not run after {list(starts)[-1]}; list names in forward order"
            )
        reached = inside[0]
        starts[name] = leaves[reached]
    return starts if leaves[0] in starts.values() else {leaves[0]: leaves[0], **starts}


def _cannot_start(layout: Layout, scheme: str, name: str) -> str:
    leaves = [leaf for step in layout.steps for leaf in step.leaves]
    around = [leaf.name for leaf in leaves if any(name == own or name.startswith(f"{own}.") for own in leaf.owns)]
    why = f"{name} is inside {around[0]}, which cannot be divided" if around else f"there is no module {name!r}"
    names = [step.name for step in layout.steps]
    known = ", ".join([*names[:16], "..."] if len(names) > 16 else names)
    schemes = ", ".join(layout.schemes)
    return (
        f"blocks ({scheme}): {why}; use {schemes}, or names of modules that start a block, in "
        f"forward order, from {known}"
    )


Part = nn.Module | Call | Sequence[nn.Module | Call]


@dataclass(frozen=True, eq=False)
class Block:
    """The smallest unit that can be frozen: a sequence of calls, with their modules, parameters and buffers.

    Attributes:
        name: unique in the chain.
        steps: modules and functions; the first takes the block's input and does not change it.
        modules: every submodule that runs in this block alone.
        parameter_names: the block's parameters, as in `model.named_parameters()`.
        buffer_names: the block's buffers, as in `model.named_buffers()`.
    """

    name: str
    steps: tuple[Call, ...]
    modules: tuple[nn.Module, ...]
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the block's output for input `x`, (N, ...)."""
        for step in self.steps:
            x = step(x)
        return x


@dataclass(frozen=True, eq=False)
class Chain:
    """A model as blocks in forward order; each parameter and buffer of the model belongs to exactly one block.

    Attributes:
        model: the original module; its state_dict is the chain's.
        blocks: in forward order; the last is the head, which is never frozen.
        tied: names of parameters that the first and the last block share, such as a language model's embedding.
    """

    model: nn.Module
    blocks: tuple[Block, ...]
    tied: tuple[str, ...] = ()

    @property
    def containers(self) -> tuple[nn.Module, ...]:
        """Modules whose forward pass runs the blocks; empty for a chain that runs block by block."""
        return ()

    @classmethod
    def from_modules(
        cls,
        model: nn.Module,
        parts: Iterable[tuple[str, Part]],
        *,
        owns: Mapping[str, Sequence[str]] | None = None,
        tied: Sequence[str] = (),
        example: Tensor | None = None,
    ) -> Chain:
        """Build a chain from blocks that the caller defines.

        Args:
            model: the module whose forward pass equals the parts.
            parts: for each block its name and a submodule of `model`, a function, or a list of these, in forward order.
            owns: block name -> names of parameters, buffers and modules that the block's functions use.
            tied: names of parameters of the first block that functions of the last block also use.
            example: inputs, (N, ...), for `verify`; None skips the check.

        Raises:
            UsageError: a module is not part of `model`, a parameter belongs to no block or to several.
        """
        names = {id(module): name for name, module in model.named_modules()}
        groups: list[Group] = []
        for block, part in parts:
            calls: Sequence[nn.Module | Call] = part if isinstance(part, Sequence) else [part]
            modules = [call for call in calls if isinstance(call, nn.Module)]
            if any(not names.get(id(module)) for module in modules):
                raise UsageError(f"block {block}: one of its modules is not a submodule of {type(model).__name__}")
            claimed = (*[names[id(module)] for module in modules], *(owns or {}).get(block, ()))
            groups.append((block, (Step(block, tuple(calls), claimed),)))
        chain = _assemble(model, groups, tied=tied)
        if example is not None:
            chain.verify(example)
        return chain

    def __call__(self, x: Tensor) -> Tensor:
        """Return the model's output for `x`, (N, ...)."""
        return self.run(x, 0, len(self.blocks))

    def run(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of blocks start..stop-1 for `x`, the input of block `start`; `x` is not changed."""
        for block in self.blocks[self._bound(start) : self._bound(stop)]:
            x = block(x)
        return x

    def prefix(self, cut: int) -> Callable[[Tensor], Tensor]:
        """Return the function of the first `cut` blocks."""
        return partial(self.run, start=0, stop=self._bound(cut))

    def suffix(self, cut: int) -> Callable[[Tensor], Tensor]:
        """Return the function of the blocks from `cut` to the head."""
        return partial(self.run, start=self._bound(cut), stop=len(self.blocks))

    def named_parameters(self, start: int = 0, stop: int | None = None) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of blocks start..stop-1, block by block, named as in `model.named_parameters()`.

        Raises:
            UsageError: the model has lost one of them, e.g. by pruning.
        """
        names = [name for block in self._range(start, stop) for name in block.parameter_names]
        return self._tensors(names, self.model.get_parameter)

    def named_buffers(self, start: int = 0, stop: int | None = None) -> list[tuple[str, Tensor]]:
        """Return the buffers of blocks start..stop-1, block by block, named as in `model.named_buffers()`.

        Raises:
            UsageError: the model has lost one of them.
        """
        names = [name for block in self._range(start, stop) for name in block.buffer_names]
        return self._tensors(names, self.model.get_buffer)

    def modules(self, start: int = 0, stop: int | None = None) -> list[nn.Module]:
        """Return every submodule of blocks start..stop-1; a container that runs in several blocks is in none."""
        return [module for block in self._range(start, stop) for module in block.modules]

    def verify(self, example: Tensor) -> None:
        """Check that the blocks compute the same as the model for `example`, (N, ...); modes and buffers are unchanged.

        Compares evaluation mode, and training mode with equal random numbers, which finds misplaced dropouts. Training
        mode is skipped if the model itself refuses so few rows. Blocks and model must change the same buffers and give
        gradients to the same parameters.

        Raises:
            UsageError: a block fails, changes its input or returns no tensor, or results are not equal bit for bit.
        """
        with state_kept(self.model):
            for training in (False, True):
                differs = self._differs(example, training=training)
                if differs:
                    how = " while it trains" if training else ""
                    raise UsageError(
                        f"blocks ({', '.join(block.name for block in self.blocks)}): run in order they "
                        f"do not {differs}{how}; call each module once, in the order of the data, "
                        f"and use requires_grad=False instead of torch.no_grad; write any other "
                        f"model out with Chain.from_modules"
                    )

    def _differs(self, example: Tensor, *, training: bool) -> str:
        """Return the difference between the blocks and the model's forward pass, "" if there is none."""
        model, name = self.model, type(self.model).__name__
        model.train(training)
        with torch.set_grad_enabled(training):
            torch.manual_seed(0)
            try:
                # The blocks start with the same buffers as the model: a forward pass may change them.
                with state_kept(model):
                    answer = model(example.clone())
                    # Classifiers of transformers return a ModelOutput.
                    expected = getattr(answer, "logits", answer)
                    buffers = {buffer: tensor.clone() for buffer, tensor in model.named_buffers()}
            except Exception as error:  # the user's module may fail in any way
                if training and isinstance(error, ValueError):  # a BatchNorm with one value per channel
                    return ""
                when = " while it trains" if training else ""
                raise UsageError(f"model ({name}): its forward pass fails{when}: {told(error)}") from error
            torch.manual_seed(0)
            output = example.clone()
            for block in self.blocks:
                output = _checked(block, output)
        if not (isinstance(expected, Tensor) and torch.equal(output, expected)):
            return f"return what the forward pass of {name} returns"
        for buffer, tensor in model.named_buffers():
            if not torch.equal(tensor, buffers[buffer]):
                return f"change the buffer {buffer} like the forward pass of {name}"
        reached = _reached(expected) ^ _reached(output)
        odd = [parameter for parameter, tensor in model.named_parameters() if tensor in reached]
        return f"give {odd[0]} a gradient exactly when the forward pass of {name} does" if odd else ""

    def _tensors(self, names: Iterable[str], get: Callable[[str], T]) -> list[tuple[str, T]]:
        found: list[tuple[str, T]] = []
        for name in names:
            try:
                found.append((name, get(name)))
            except AttributeError as error:
                raise UsageError(
                    f"model ({type(self.model).__name__}) no longer has {name}, e.g. because the script has pruned or "
                    "re-parametrised it. Do so before DistributedOptimizer; or call optimizer.freezer.thaw(0), change "
                    "the model, and wrap the inner optimizer again: DistributedOptimizer(inner, model=model)"
                ) from error
        return found

    def _range(self, start: int, stop: int | None) -> tuple[Block, ...]:
        return self.blocks[self._bound(start) : self._bound(len(self.blocks) if stop is None else stop)]

    def _bound(self, cut: int) -> int:
        if not 0 <= cut <= len(self.blocks):
            raise UsageError(f"cut ({cut}) must be in 0..{len(self.blocks)}, the number of blocks")
        return cut


def cut_into_blocks(model: nn.Module, *, scheme: str = "stage", example: Tensor | None = None) -> Chain:
    """Divide `model` into a chain of blocks.

    Args:
        model: a torchvision classifier, or any module whose forward pass torch.fx can trace.
        scheme: `stage`, `residual` (the finest blocks; for ResNets the residual blocks), `paper` (ResNets: conv1,
            bn1+relu+maxpool, layer1-4, head), or NAME,NAME,...: modules that start a block, in forward order; the steps
            before the first are a block too. For a custom module, `stage` makes each child with parameters a block.
        example: inputs, (N, ...), for comparing the chain with the model's own forward pass. Required for a custom
            module that is not an nn.Sequential; else optional.

    Raises:
        UsageError: a name of the scheme cannot start a block, or the blocks do not equal the model's forward pass.
    """
    layout = layout_of(model)
    try:
        return cut_by(layout, model, scheme=scheme, example=example)
    except UsageError as error:
        if example is None or layout.verified:
            raise
        # Its forward pass may do more than run its children. Importing torch.fx takes a tenth of a second.
        from hvfreeze.model.forward_steps import forward_layout

        try:
            return cut_by(forward_layout(model, example), model, scheme=scheme, example=example)
        except UsageError as other:
            # If it only runs its children, the names are wrong.
            if _runs_its_children(layout, model, example):
                raise error from None
            raise other from error


def _runs_its_children(layout: Layout, model: nn.Module, example: Tensor) -> bool:
    try:
        cut_by(layout, model, scheme="stage", example=example)
    except UsageError:
        return False
    return True


def cut_by(layout: Layout, model: nn.Module, *, scheme: str, example: Tensor | None) -> Chain:
    """Divide `model` into blocks of its layout's steps; see `cut_into_blocks`."""
    chain = _assemble(model, group_steps(layout, scheme=scheme), tied=layout.tied)
    if example is None and not layout.verified:
        raise UsageError(
            f"blocks ({scheme}): {type(model).__name__} is not a torchvision classifier, so its blocks "
            f"must be compared with its forward pass: pass a batch of its inputs as example="
        )
    if example is not None:
        chain.verify(example)
    return chain


def _assemble(model: nn.Module, groups: Sequence[Group], *, tied: Sequence[str] = ()) -> Chain:
    names = [name for name, _ in groups]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"blocks ({', '.join(names)}): give at least one block, with different names")
    owners = owners_of(groups)
    _check_dropouts(model, owners, names)
    calls = [(name, tuple(call for step in steps for call in step.calls)) for name, steps in groups]
    blocks = make_blocks(model, calls, owners, buffers=model.named_buffers(remove_duplicate=False))
    other = [name for name in tied if name not in blocks[0].parameter_names]
    if other:
        raise UsageError(f"tied ({other[0]}) must name parameters of the first block, {blocks[0].name}")
    return Chain(model, blocks, tuple(tied))


def make_blocks(
    model: nn.Module,
    calls: Sequence[tuple[str, tuple[Call, ...]]],
    owners: Ownership,
    *,
    buffers: Iterable[tuple[str, Tensor]],
    without: Iterable[str] = (),
) -> tuple[Block, ...]:
    """Return blocks with their modules, parameters and buffers; each parameter and buffer belongs to exactly one.

    Args:
        model: the model.
        calls: for each block its name and its calls.
        owners: the blocks that use a module, a parameter or a buffer.
        buffers: the model's buffers, by name.
        without: names of modules that belong to no block.

    Raises:
        IndivisibleError: a parameter or buffer belongs to no block, or to several.
    """
    names = [name for name, _ in calls]
    modules: list[list[nn.Module]] = [[] for _ in calls]
    for path, module in model.named_modules():
        users = owners.blocks_with(path)
        if path and len(users) == 1 and path not in without:
            modules[min(users)].append(module)
    trained = members(model.named_parameters(remove_duplicate=False), owners, names)
    kept = members(buffers, owners, names)
    return tuple(
        Block(name, steps, tuple(modules[index]), tuple(trained[index]), tuple(kept[index]))
        for index, (name, steps) in enumerate(calls)
    )


def _reached(output: Tensor) -> set[Any]:
    """Return the leaf tensors of `output`'s gradient graph."""
    found, ahead, seen = set[Any](), [output.grad_fn], set[Any]()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(getattr(node, "variable", None))
            ahead += [inner for inner, _ in node.next_functions]
    return found


def _checked(block: Block, x: Tensor) -> Tensor:
    version = x._version
    try:
        output = block(x)
    except Exception as error:  # the user's module may fail in any way
        raise UsageError(f"block {block.name} cannot run on a tensor of shape {tuple(x.shape)}: {error}") from error
    if not isinstance(output, Tensor):
        raise UsageError(f"block {block.name} returns a {type(output).__name__}; blocks must return one tensor")
    if output.shape[:1] != x.shape[:1]:
        raise UsageError(
            f"block {block.name} returns a tensor of shape {tuple(output.shape)} for {len(x)} samples; "
            f"end it where the tensor has a row per sample"
        )
    if x._version != version:
        raise UsageError(f"block {block.name} changes its input in place; start it after the in-place operation")
    return output
