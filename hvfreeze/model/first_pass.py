"""Finds a model's blocks in its first forward pass of training, by hooks that leave after it.

Some scripts train in evaluation mode, as to keep BatchNorm's statistics. So a pass in that mode counts where gradients
are computed, until one in training mode is seen.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from hvfreeze.errors import UsageError
from hvfreeze.model.traced import TracedChain, Watch, blocks_from


class FirstPass:
    """Waits for a forward pass with gradients, in training mode where there is one, and watches it.

    Attributes:
        chain: the model in blocks, once the pass is over and where it could be divided.
        why_not: why it is not, until it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.chain: TracedChain | None = None
        self.why_not = (
            f"no forward pass of {type(model).__name__} was seen before the first step: call model(...) itself, not "
            "compiled, or give example= or blocks="
        )
        self._watch: Watch | None = None
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Watch no longer."""
        if self._watch is not None:
            self._watch.close()
        for hook in self._hooks:
            hook.remove()
        self._watch, self._hooks = None, []

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        # A compiler that traces the pass would trace the hooks into what it compiles.
        if torch.compiler.is_compiling() or self._watch is not None or not torch.is_grad_enabled():
            return
        if self.chain is not None and not model.training:
            return
        compiled = any(name.rpartition(".")[2] == "_orig_mod" for name, _ in model.named_modules())
        if not compiled and any(parameter.requires_grad for parameter in model.parameters()):
            self._watch = Watch(model)

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._watch is None:
            return
        watch, self._watch = self._watch, None
        watch.close()
        if watch.active or sys.exc_info()[0] is not None:
            return  # the pass has failed; a script may try again
        if model.training:
            self.close()
        try:
            self.chain = blocks_from(model, watch.calls, known_use=True)
        except UsageError as error:
            self.chain, self.why_not = None, str(error)
