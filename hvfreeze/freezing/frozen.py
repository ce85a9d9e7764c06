"""What frozen means: for modules, for the optimizer, and for the first blocks of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hvfreeze.chain.blocks import Chain
from hvfreeze.errors import DivergedError, UsageError


class Seal:
    """Notices when a tensor that must not change is written to; writes through `.data` escape it."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._sealed = [(name, tensor, tensor._version) for name, tensor in named]

    def check(self, *, step: int) -> None:
        """Raise DivergedError, on this rank alone, when a sealed tensor has been written to since."""
        for name, tensor, version in self._sealed:
            if tensor._version != version:
                error = DivergedError(
                    f"frozen {name} changed in step {step}, though no update may touch it; thaw its block with "
                    "Freezer.thaw before you change it"
                )
                error.everywhere = False
                raise error


def _stay_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    return self


def hold_in_eval(module: nn.Module) -> None:
    """Put `module` into evaluation mode and make its `train()` leave it there."""
    module.training = False
    # Not a bound method: such a model could not be read again once it has been pickled.
    module.__dict__["train"] = partial(_stay_in_eval, module)


def release(module: nn.Module) -> None:
    """Undo `hold_in_eval`; the module trains again."""
    if module.__dict__.pop("train", None) is not None:
        module.training = True


def trainable_of(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that are trainable now: what their owner has frozen is not among them."""
    return frozenset(parameter for parameter in model.parameters() if parameter.requires_grad)


def release_model(model: nn.Module, trainable: frozenset[nn.Parameter]) -> None:
    """Let every module, and every parameter that is in `trainable`, train again."""
    for module in model.modules():
        release(module)
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trainable)
        parameter.grad = None


def prune_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> None:
    """Leave exactly the trainable ones of the original `groups` in the optimizer; drop the state of the others."""
    for group, original in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameter for parameter in original if parameter.requires_grad]
    for parameter in [parameter for group in groups for parameter in group if not parameter.requires_grad]:
        optimizer.state.pop(parameter, None)


class FrozenPrefix:
    """The first `cut` blocks of a chain, kept as they are, and which parameters of the others train.

    A parameter that the optimizer does not hold, or that is not trainable now, is left alone at every cut.

    Args:
        chain: the model in blocks.
        optimizer: over the chain's parameters; frozen parameters leave its groups.
        held: the blocks lo..hi-1 that this rank has, where the chain is cut over ranks; None is all.
    """

    def __init__(self, chain: Chain, optimizer: torch.optim.Optimizer, *, held: tuple[int, int] | None = None) -> None:
        self.cut = 0
        self._chain, self._optimizer, self._held = chain, optimizer, held or (0, len(chain.blocks))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        given = {parameter for group in self._groups for parameter in group}
        own = {parameter for _, parameter in chain.named_parameters(*self._held)}
        self._left_out = {p for _, p in chain.named_parameters() if not p.requires_grad or p in own - given}
        self._seal: Seal | None = None

    def refuse(self, cut: int) -> None:
        """Raise UsageError where so many blocks cannot be frozen."""
        deepest = len(self._chain.blocks) - 1
        if not 0 <= cut <= deepest:
            names = ", ".join(block.name for block in self._chain.blocks)
            raise UsageError(f"--cut ({cut}) must be in 0..{deepest}: the blocks are {names}; the head is never frozen")

    def move(self, cut: int) -> None:
        """Freeze exactly the first `cut` blocks from now on, and seal them."""
        for block in range(len(self._chain.blocks)):
            frozen = block < cut
            for module in self._chain.modules(block, block + 1):
                hold_in_eval(module) if frozen else release(module)
            for _, parameter in self.trained(block, block + 1):
                parameter.requires_grad_(not frozen)
                parameter.grad = None
        prune_optimizer(self._optimizer, self._groups)
        self.cut = cut
        self.seal()

    def trained(self, start: int, stop: int | None = None) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of blocks start..stop-1, but for those that the user took out of training himself."""
        named = self._chain.named_parameters(start, stop)
        return [(name, parameter) for name, parameter in named if parameter not in self._left_out]

    def carried(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank holds and still trains."""
        start, stop = self._held
        return self.trained(max(self.cut, start), stop) if self.cut < stop else []

    def seal(self) -> None:
        """Take frozen parameters and buffers as they are now for what must not change any more."""
        start, stop = self._held
        held = (start, max(start, min(stop, self.cut)))
        self._seal = Seal([*self._chain.named_parameters(*held), *self._chain.named_buffers(*held)])

    def unseal(self) -> None:
        """Let frozen tensors be written to until the next `check`: what a start loads or broadcasts is no change."""
        self._seal = None

    def check(self, *, step: int) -> None:
        """Raise DivergedError where a frozen tensor has changed since it was sealed; seal what is unsealed."""
        if self._seal is None:
            self.seal()
        else:
            self._seal.check(step=step)
