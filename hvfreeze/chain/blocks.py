"""A model as an ordered chain of blocks; a cut k splits it into the frozen prefix (blocks 0..k-1) and the suffix.

    chain = cut_into_blocks(torchvision.models.resnet18())        # stem, layer1, layer2, layer3, layer4, head
    h = chain.prefix(3)(images)                                   # one tensor at every cut
    logits = chain.suffix(3)(h)                                   # bit for bit what the model gives; h is unchanged

Your own model, when its children run one after another in the order in which they were defined:

    chain = cut_into_blocks(net, scheme="encoder,classifier", example=images)

and any other, written out with the functions that run between its modules:

    chain = Chain.from_modules(net, [("encoder", net.encoder), ("head", [net.pool, torch.flatten, net.fc])])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hvfreeze.chain.families import layout_of
from hvfreeze.chain.grouping import Group, group_steps, owned_by
from hvfreeze.chain.steps import Call, Step
from hvfreeze.errors import UsageError

Part = nn.Module | Call | Sequence[nn.Module | Call]


@dataclass(frozen=True, eq=False)
class Block:
    """The smallest unit that can be frozen: calls that run one after another, and what they own of the model.

    Attributes:
        name: unique in the chain.
        steps: modules and functions; the first takes the block's input, none changes it.
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
    """

    model: nn.Module
    blocks: tuple[Block, ...]

    @property
    def containers(self) -> tuple[nn.Module, ...]:
        """The modules whose own forward pass runs the blocks; none, where a chain is run block by block."""
        return ()

    @classmethod
    def from_modules(
        cls,
        model: nn.Module,
        parts: Iterable[tuple[str, Part]],
        *,
        owns: Mapping[str, Sequence[str]] | None = None,
        example: Tensor | None = None,
    ) -> Chain:
        """Return `model` as the blocks that the caller writes out.

        Args:
            model: the module whose forward pass the parts repeat.
            parts: for each block its name and a submodule of `model`, a function, or a list of these, in forward order.
            owns: block name -> names of parameters, buffers and modules that the block's functions use.
            example: inputs, (N, ...); when given, `verify` is called with them.

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
        chain = _assemble(model, groups)
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
        """Return the parameters of blocks start..stop-1, block by block, named as in `model.named_parameters()`."""
        names = [name for block in self._range(start, stop) for name in block.parameter_names]
        return [(name, self.model.get_parameter(name)) for name in names]

    def named_buffers(self, start: int = 0, stop: int | None = None) -> list[tuple[str, Tensor]]:
        """Return the buffers of blocks start..stop-1, block by block, named as in `model.named_buffers()`."""
        names = [name for block in self._range(start, stop) for name in block.buffer_names]
        return [(name, self.model.get_buffer(name)) for name in names]

    def modules(self, start: int = 0, stop: int | None = None) -> list[nn.Module]:
        """Return every submodule of blocks start..stop-1; a container that runs in several blocks is in none."""
        return [module for block in self._range(start, stop) for module in block.modules]

    def verify(self, example: Tensor) -> None:
        """Run `example`, (N, ...), through the blocks and the model, and compare; modes and buffers stay as they were.

        In evaluation mode, and in training mode with the same random numbers, which tells where a dropout stands. The
        latter is left out where the model itself refuses so few rows.

        Raises:
            UsageError: a block fails, changes its input or gives no tensor, or the results are not equal bit for bit.
        """
        modes = {module: module.training for module in self.model.modules()}
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                same = self._gives_the_same(example, training=False) and self._gives_the_same(example, training=True)
        finally:
            for module, mode in modes.items():
                module.training = mode
            for buffer, value in buffers:
                buffer.copy_(value)
        if not same:
            raise UsageError(
                f"blocks ({', '.join(block.name for block in self.blocks)}): run one after another they do not give "
                f"what the forward pass of {type(self.model).__name__} gives. Children must run once each, in the "
                "order in which they were defined; write any other model out with Chain.from_modules"
            )

    def _gives_the_same(self, example: Tensor, *, training: bool) -> bool:
        self.model.train(training)
        torch.manual_seed(0)
        try:
            expected = self.model(example.clone())
        except ValueError:
            if training:  # a BatchNorm that is given one value a channel
                return True
            raise
        torch.manual_seed(0)
        output = example.clone()
        for block in self.blocks:
            output = _checked(block, output)
        return isinstance(expected, Tensor) and torch.equal(output, expected)

    def _range(self, start: int, stop: int | None) -> tuple[Block, ...]:
        return self.blocks[self._bound(start) : self._bound(len(self.blocks) if stop is None else stop)]

    def _bound(self, cut: int) -> int:
        if not 0 <= cut <= len(self.blocks):
            raise UsageError(f"cut ({cut}) must lie in 0..{len(self.blocks)}, the number of blocks")
        return cut


def cut_into_blocks(model: nn.Module, *, scheme: str = "stage", example: Tensor | None = None) -> Chain:
    """Return `model` as a chain of blocks.

    Args:
        model: a torchvision classifier, or a module whose children run one after another as they were defined.
        scheme: `stage`, `residual` (the finest blocks; for ResNets the residual blocks), `paper` (ResNets: conv1,
            bn1+relu+maxpool, layer1-4, head), or NAME,NAME,...: each names a module that starts a block, in forward
            order; what runs before the first is a block too. For a module of your own, `stage` makes each child with
            parameters a block.
        example: inputs, (N, ...), on which the chain is compared with the model's own forward pass. Needed for a
            module of your own, unless it is an nn.Sequential; optional otherwise.

    Raises:
        UsageError: the scheme names what cannot start a block, or the blocks do not repeat the model's forward pass.
    """
    layout = layout_of(model)
    chain = _assemble(model, group_steps(layout, scheme=scheme))
    if example is None and not layout.verified:
        raise UsageError(
            f"blocks ({scheme}): {type(model).__name__} is no torchvision classifier, so its blocks must be compared "
            "with its own forward pass once: pass example=, a batch of its inputs"
        )
    if example is not None:
        chain.verify(example)
    return chain


def _assemble(model: nn.Module, groups: Sequence[Group]) -> Chain:
    blocks = []
    for (name, steps), own in zip(groups, owned_by(model, groups), strict=True):
        calls = tuple(call for step in steps for call in step.calls)
        blocks.append(Block(name, calls, own.modules, own.parameters, own.buffers))
    return Chain(model, tuple(blocks))


def _checked(block: Block, x: Tensor) -> Tensor:
    version = x._version
    try:
        output = block(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UsageError(f"block {block.name} cannot run on a tensor of shape {tuple(x.shape)}: {error}") from error
    if not isinstance(output, Tensor):
        raise UsageError(f"block {block.name} gives a {type(output).__name__}; the boundary of a block is one tensor")
    if x._version != version:
        raise UsageError(f"block {block.name} changes its input in place: start it after the operation that does so")
    return output
