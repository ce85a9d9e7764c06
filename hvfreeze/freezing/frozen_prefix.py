"""Freezing of modules, of the optimizer's parameters, and of the first blocks of a chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvfreeze.errors import DivergedError, UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.runs.reading import Move


class Seal:
    """Detects writes to a tensor that must not change, except those through `.data`."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._sealed = [(name, tensor, tensor._version) for name, tensor in named]

    def check(self, *, step: int) -> None:
        """Raise DivergedError, on this rank only, if a sealed tensor has been written to."""
        for name, tensor, version in self._sealed:
            if tensor._version != version:
                raise DivergedError(
                    f"frozen {name} changed in step {step}; only trained blocks may change. Call Freezer.thaw "
                    f"before you change a frozen block{'' if isinstance(tensor, nn.Parameter) else BY_ITS_MODULE}"
                ).on_this_rank()


BY_ITS_MODULE = (
    ". If your code does not change this buffer, its module writes it in evaluation mode too, as a counter or "
    "FakeQuantize does; pass blocks= so that the module is in the last block, which is never frozen"
)


def _stay_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    """Record the mode that the module's own `train(mode)` sets, for `release`, and stay in evaluation mode."""
    own = getattr(self.__dict__.get("train"), "before", None) or partial(type(self).train, self)
    release(self)
    own(mode)
    hold_in_eval(self)
    return self


def hold_in_eval(module: nn.Module) -> None:
    """Put `module` into evaluation mode and make its `train()` keep it there until `release`."""
    before = module.__dict__.get("train")
    if getattr(before, "func", None) is not _stay_in_eval:
        # Not a bound method: a pickled model that has one cannot be loaded.
        held: Any = partial(_stay_in_eval, module)
        held.mode, held.before = module.training, before
        module.__dict__["train"] = held
    module.training = False


def release(module: nn.Module) -> None:
    """Undo `hold_in_eval`; the module gets the mode that its own `train()` set last, or its mode before."""
    held = module.__dict__.get("train")
    if getattr(held, "func", None) is not _stay_in_eval:
        return
    del module.__dict__["train"]
    # Models pickled by earlier versions have recorded neither.
    before = getattr(held, "before", None)
    if before is not None:
        module.__dict__["train"] = before
    module.training = getattr(held, "mode", True)


def hold_still(chain: Chain, cut: int) -> None:
    """Freeze the first `cut` blocks permanently, so that they are a pure function of their input."""
    for module in chain.modules(0, cut):
        hold_in_eval(module)
    for _, parameter in chain.named_parameters(0, cut):
        parameter.requires_grad_(False)


def trainable_of(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that are trainable now, which excludes parameters that the user has frozen."""
    return frozenset(parameter for parameter in model.parameters() if parameter.requires_grad)


def release_model(model: nn.Module, trainable: frozenset[nn.Parameter]) -> None:
    """Make every module, and every parameter in `trainable`, train again."""
    for module in model.modules():
        release(module)
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trainable)
        parameter.grad = None


def give_buffers(optimizer: torch.optim.Optimizer, again: Collection[Tensor]) -> None:
    """Give thawed parameters zero momentum, which fused SGD needs if other parameters have momentum.

    Other optimizers create a parameter's state in its first step.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []:
        others = [parameter for parameter in group["params"] if parameter not in again]
        if group.get("fused") and any("momentum_buffer" in optimizer.state.get(other, {}) for other in others):
            for parameter in group["params"]:
                if parameter in again:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class FrozenPrefix:
    """The owner of the cut: keeps the first `cut` blocks of a chain frozen, and notifies others of changes.

    A parameter that the optimizer does not hold, or that is not trainable now, is ignored at every cut. If a script may
    switch `requires_grad` from step to step, a parameter that is off now may train later. One that is off when its
    block is frozen stays off when the block is thawed, unless the script switches it on in between.

    Args:
        chain: the model in blocks.
        optimizer: over the chain's parameters; frozen parameters leave its groups.
        held: the blocks lo..hi-1 of this rank, if the chain is cut over ranks; None is all.
        switched: whether a script may switch `requires_grad` from step to step.
        keeps_statistics: whether BatchNorm normalises with its running statistics, without updating them, in every
            block.

    Attributes:
        history: the cut at the start and after every change.
    """

    def __init__(
        self,
        chain: Chain,
        optimizer: torch.optim.Optimizer,
        *,
        held: tuple[int, int] | None = None,
        switched: bool = False,
        keeps_statistics: bool = False,
    ) -> None:
        self.history: list[Move] = []
        self._listeners: list[Callable[[], None]] = []
        self._keeps_statistics = keeps_statistics
        self.chain, self._optimizer, self.held = chain, optimizer, held or (0, len(chain.blocks))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._switched = switched
        self._left_out = self._never_trained()
        self._frozen: list[nn.Parameter] = []
        """Parameters of the frozen blocks, except ignored ones."""
        self._stopped: set[nn.Parameter] = set()
        """Parameters whose `requires_grad` is off only because their block is frozen."""
        self._reached: list[Any] = []
        """Hooks on frozen parameters that a backward pass must reach."""
        self._seal: Seal | None = None

    @property
    def cut(self) -> int:
        """The number of frozen blocks."""
        return self.history[-1].cut if self.history else 0

    @property
    def groups(self) -> list[list[Tensor]]:
        """The parameters of the optimizer's groups, including frozen ones."""
        return self._groups

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts so far, the current one last."""
        return tuple(move.cut for move in self.history)

    def on_move(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of the cut or of the blocks. Callbacks run in order of registration."""
        self._listeners.append(callback)

    def refuse(self, cut: int) -> None:
        """Raise UsageError if `cut` blocks cannot be frozen."""
        deepest = len(self.chain.blocks) - 1
        if not 0 <= cut <= deepest:
            names = ", ".join(block.name for block in self.chain.blocks)
            raise UsageError(
                f"--cut ({cut}) must be in 0..{deepest}, because the head is never frozen; the blocks are {names}"
            )

    def move(self, *moves: Move) -> None:
        """Freeze exactly the first `moves[-1].cut` blocks from now on, seal them, and call the callbacks."""
        self.history += moves
        self._reach_no_more()
        again: set[Tensor] = set()
        for block in range(len(self.chain.blocks)):
            frozen = block < self.cut
            for module in self.chain.modules(block, block + 1):
                kept = self._keeps_statistics and isinstance(module, _BatchNorm)
                hold_in_eval(module) if frozen or kept else release(module)
            for _, parameter in self.trained(block, block + 1):
                if frozen:
                    if parameter.requires_grad:
                        self._stopped.add(parameter)
                        parameter.requires_grad_(False)
                    parameter.grad = None
                elif parameter in self._stopped:
                    self._stopped.remove(parameter)
                    parameter.requires_grad_(True)
                    again.add(parameter)
        self._prune()
        give_buffers(self._optimizer, again)
        self.seal()
        for callback in self._listeners:
            callback()

    def adopt(self, chain: Chain) -> None:
        """Use another division of the same model into blocks, none of which is frozen yet, and call the callbacks."""
        assert self.cut == 0 and chain.model is self.chain.model
        self.chain, self.held = chain, (0, len(chain.blocks))
        self._left_out = self._never_trained()
        for callback in self._listeners:
            callback()

    def reach(self, take: Callable[[str, Tensor], bool]) -> None:
        """Make backward passes reach frozen parameters until `stop_again`, without updating them.

        `take` is called with each name and gradient, which is then dropped. If it returns True, the parameter is
        switched off at once, because scripts expect a gradient wherever `requires_grad` is on.
        """

        def hook_for(name: str) -> Callable[[Tensor], None]:
            def taken(parameter: Tensor) -> None:
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None and take(name, gradient):
                    parameter.requires_grad_(False)

            return taken

        for name, parameter in self.trained(0, self.cut):
            if parameter in self._stopped:
                parameter.requires_grad_(True)
                self._reached.append(parameter.register_post_accumulate_grad_hook(hook_for(name)))

    def stop_again(self) -> None:
        """Switch off parameters of frozen blocks that are on, because clipping would include their gradients."""
        self._reach_no_more()
        for parameter in self._frozen:
            if parameter.requires_grad:
                self._stopped.add(parameter)
                parameter.requires_grad_(False)
                parameter.grad = None

    @contextmanager
    def all_parameters(self) -> Iterator[None]:
        """Put frozen parameters back into the optimizer's groups inside the context."""
        for group, original in zip(self._optimizer.param_groups, self._groups, strict=False):
            group["params"] = list(original)
        try:
            yield
        finally:
            self._prune()

    def restore(self, history: Sequence[Move]) -> None:
        """Replace the history by `history`, freeze up to its last cut, and call the callbacks."""
        self.history = []
        self.move(*history)

    def trained(self, start: int, stop: int | None = None) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of blocks start..stop-1, except ignored ones."""
        named = self.chain.named_parameters(start, stop)
        return [(name, parameter) for name, parameter in named if parameter not in self._left_out]

    def carried(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank holds and still trains."""
        start, stop = self.held
        return self.trained(max(self.cut, start), stop) if self.cut < stop else []

    def seal(self) -> None:
        """Seal the frozen parameters and buffers: they must not change from now on."""
        start, stop = self.held
        held = (start, max(start, min(stop, self.cut)))
        self._seal = Seal([*self.chain.named_parameters(*held), *self.chain.named_buffers(*held)])

    def unseal(self) -> None:
        """Allow writes to frozen tensors until the next `check`, because a start may load or broadcast them."""
        self._seal = None

    def check(self, *, step: int) -> None:
        """Raise DivergedError if a frozen tensor has changed since it was sealed; if none is sealed, seal them."""
        if self._seal is None:
            self.seal()
        else:
            self._seal.check(step=step)

    def _reach_no_more(self) -> None:
        for hook in self._reached:
            hook.remove()
        self._reached = []

    def _never_trained(self) -> set[nn.Parameter]:
        """Return parameters that the optimizer does not hold, or that no gradient will reach."""
        given = {parameter for group in self._groups for parameter in group}
        own = {parameter for _, parameter in self.chain.named_parameters(*self.held)}
        every = {parameter for _, parameter in self.chain.named_parameters()}
        return (own - given) | {parameter for parameter in every if not self._may_train(parameter)}

    def _may_train(self, parameter: Tensor) -> bool:
        return parameter.is_floating_point() or parameter.is_complex() if self._switched else parameter.requires_grad

    def _prune(self) -> None:
        """Keep the trained parameters in the optimizer's groups, and drop the state of frozen ones."""
        self._frozen = [parameter for _, parameter in self.trained(0, self.cut)]
        frozen = set(self._frozen)
        for group, original in zip(self._optimizer.param_groups, self._groups, strict=False):
            kept = [parameter for parameter in original if self._switched or parameter.requires_grad]
            group["params"] = [parameter for parameter in kept if parameter not in frozen]
        for parameter in frozen:
            self._optimizer.state.pop(parameter, None)
