"""What frozen means for modules and for the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hvfreeze.errors import DivergedError


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


def release_model(model: nn.Module) -> None:
    """Let every module and parameter train again, whoever has frozen it."""
    for module in model.modules():
        release(module)
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None


def prune_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> None:
    """Leave exactly the trainable ones of the original `groups` in the optimizer; drop the state of the others."""
    for group, original in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameter for parameter in original if parameter.requires_grad]
    for parameter in [parameter for group in groups for parameter in group if not parameter.requires_grad]:
        optimizer.state.pop(parameter, None)
