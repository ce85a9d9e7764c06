"""Finds the blocks of a script's model: from its class, by running it on an example, or in its first forward pass.

Hooks watch the first forward pass of training and are removed after it. Some scripts train in evaluation mode, e.g. to
keep BatchNorm's statistics. So a pass in that mode with gradients counts until one in training mode is seen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.integration.script_world import log
from hvfreeze.model.blocks import Chain, IndivisibleError
from hvfreeze.model.traced import (
    SCHEMES,
    Inputs,
    TracedChain,
    Watch,
    blocks_from,
    describe_blocks,
    from_description,
    in_blocks,
    knows_its_order,
    undivided,
)


class FoundBlocks:
    """A model in blocks; a single block until the first step if they are found in the first forward pass.

    Attributes:
        chain: the model in blocks, as known when the optimizer is created.
        description: of blocks found in a forward pass, else None.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        trained: Collection[Tensor],
        blocks: str | Sequence[str] | None,
        example: Inputs | None,
        settings: FreezeConfig,
    ) -> None:
        """Find the blocks, or start to wait for the model's first forward pass in training.

        Args:
            model: any module.
            world: the ranks.
            trained: the optimizer's parameters.
            blocks: as given by the script.
            example: as given by the script.
            settings: freezing settings.

        Raises:
            UsageError: `blocks` or `example` does not fit the model, freezing starts before the blocks are known, or
                `settings` freezes all that the optimizer trains.
        """
        self._model, self._world, self._freezes = model, world, settings.freeze != "none"
        self._first: FirstPass | None = None
        self._waits = False
        self.description: dict[str, Any] | None = None
        self._why = ""
        self.chain: Chain = undivided(model)
        if not any(parameter in trained for parameter in model.parameters()):
            self._why = f"model= is a {type(model).__name__}, but the optimizer has none of its parameters"
            return
        named = blocks is not None and blocks not in SCHEMES
        if example is None and not named and not knows_its_order(model):
            if settings.cut:
                raise UsageError(
                    f"cut ({settings.cut}): freezing starts before the first forward pass of {type(model).__name__}, "
                    "so its blocks are not known yet; pass example= (a batch of its inputs) or blocks= (the names "
                    "of its blocks)"
                )
            self._waits = True
            # All ranks use the blocks that rank 0 finds.
            self._first = FirstPass(model) if world.rank == 0 else None
            return
        try:
            self.chain = in_blocks(model, blocks=blocks, example=example)
        except IndivisibleError as error:
            if named:
                raise
            self._why = str(error)
        if self.chain.tied:
            self._why = f"the first and the last block share {self.chain.tied[0]}, and the last block is never frozen"
            self.chain = undivided(model)
        cut = settings.cut or 0
        if 0 < cut < len(self.chain.blocks) and {p for _, p in self.chain.named_parameters(0, cut)}.issuperset(trained):
            raise UsageError(
                f"cut ({cut}) freezes every parameter of the optimizer, so nothing trains; use a smaller cut, or give "
                "the optimizer the parameters of later blocks too"
            )

    def warn_if_single(self) -> bool:
        """Warn if the model has a single block, so that no block will be frozen; return whether it has."""
        single = self._freezes and len(self.chain.blocks) < 2 and not self._waits
        if single:
            why = self._why or f"{type(self._model).__name__} is a single block, and the last block is never frozen"
            log(self._world, "no block will be frozen: %s", why, level=logging.WARNING)
        return single

    def settle(self, freezer: Freezer) -> None:
        """Give `freezer` the blocks that rank 0 has found in the first forward pass. Collective, in every step."""
        if not self._waits:
            return
        chain = self._first.chain if self._first else None
        why = self._first.why_not if self._first else ""
        seen = (describe_blocks(chain) if chain else None, why)
        description, self._why = self._world.broadcast_object(seen, name="optimizer.blocks")
        if description is not None:
            self.restore(freezer, description)
        self._wait_no_longer()
        self.warn_if_single()

    def restore(self, freezer: Freezer, description: Mapping[str, Any] | None) -> None:
        """Give `freezer` the blocks found in a forward pass, here or in an earlier run. Not a collective.

        Raises:
            UsageError: the model differs from the one in which they were found.
        """
        if self._waits and description is not None:
            self.description = dict(description)
            self.chain = from_description(self._model, description)
            freezer.prefix.adopt(self.chain)
            self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        self._waits = False
        if self._first is not None:
            self._first.close()
            self._first = None


class FirstPass:
    """Waits for a forward pass with gradients, preferably in training mode, and watches it.

    Attributes:
        chain: the model in blocks, after the pass and if it could be divided.
        why_not: the reason if it is None.
    """

    def __init__(self, model: nn.Module) -> None:
        self.chain: TracedChain | None = None
        self.why_not = (
            f"no forward pass of {type(model).__name__} ran before the first step; call model(...) itself, not a "
            "compiled copy, or pass example= or blocks="
        )
        self._watch: Watch | None = None
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
        for hook in self._hooks:
            hook.remove()
        self._watch, self._hooks = None, []

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        # A compiler that traces the pass would compile the hooks too.
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
