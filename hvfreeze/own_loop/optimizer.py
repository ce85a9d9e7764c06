"""`hvfreeze.DistributedOptimizer`: in place of `hvd.DistributedOptimizer`, and blocks are frozen by vote.

    optimizer = hvfreeze.DistributedOptimizer(
        optimizer, model=model, steps_per_epoch=len(loader), num_epochs=epochs
    )

The rest of the script stays as it is. A backward pass sends gradients as they become ready; `step` waits for their
average, updates, and votes when a vote is due.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hvfreeze.chain.watched.calls import Inputs
from hvfreeze.chain.watched.choosing import in_blocks
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.voting.weights import Voter
from hvfreeze.own_loop.horovod_habits import (
    begin_alike,
    called_by_broadcast,
    check_arguments,
    create_state,
    reducer_of,
)
from hvfreeze.own_loop.script_world import report_errors, script_world
from hvfreeze.own_loop.stand_in import StandIn
from hvfreeze.ranks.agreement import check_equal, together
from hvfreeze.ranks.world import World

logger = logging.getLogger("hvfreeze")


class DistributedOptimizer(StandIn):
    """Wraps any torch optimizer: averages gradients over ranks, and freezes front blocks of the model by vote.

    It is the wrapped optimizer to schedulers and everybody else: the same groups, state and state_dict. With one
    process it is plain PyTorch, bit for bit, until a block is frozen.

    Attributes:
        freezer: the `Freezer`; `freezer.cut` is the number of frozen blocks.
        world: the ranks that exchange gradients and vote.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Any = None,
        compression: Any = "none",
        backward_passes_per_step: int = 1,
        op: Any = None,
        gradient_predivide_factor: float = 1.0,
        *,
        model: nn.Module,
        steps_per_epoch: int,
        num_epochs: int,
        blocks: str | None = None,
        example: Inputs | None = None,
        settings: FreezeConfig = FreezeConfig(freeze="gradient-norm"),  # noqa: B008  (frozen)
        voter: Voter = Voter(),  # noqa: B008  (frozen)
        world: World | None = None,
    ) -> None:
        """Divide `model` into blocks, and start Horovod where the script has not.

        Collective: every rank of the job must call this.

        Args:
            optimizer: any torch optimizer but LBFGS, over parameters of `model` or others. Those that are not
                trainable now stay as they are.
            named_parameters: as Horovod's; not needed, because `model` has the names.
            compression: none, fp16 or powersgd:R, or Horovod's own `hvd.Compression.fp16`.
            backward_passes_per_step: backward passes before each `step`, whose gradients are added up.
            op: as Horovod's; only the average is supported.
            gradient_predivide_factor: as Horovod's; only 1 is supported.
            model: any module; it is trained by calling it as ever.
            steps_per_epoch: optimizer steps in an epoch, equal on all ranks.
            num_epochs: how long training lasts.
            blocks: where the model may be cut: `stage`, `residual`, or NAME,NAME,...: submodules that start a block.
            example: a batch of the model's inputs, a tensor, a tuple or a dict. Needed where the model is neither a
                torchvision classifier nor an nn.Sequential, unless `blocks` names its blocks.
            settings: criterion, guards, weights and quorum of the votes.
            voter: this rank's shard, for votes weighted by it.
            world: the ranks; None is all of the job.

        Raises:
            UsageError: the settings fit neither the model nor the world, or ranks were given different ones.
        """
        self._stand_for(optimizer)
        self.world = script_world() if world is None else world
        report_errors(self.world)
        given = {"steps_per_epoch": steps_per_epoch, "num_epochs": num_epochs, "passes": backward_passes_per_step}
        check_equal(self.world, "arguments", {**given, **dataclasses.asdict(settings)})

        def build() -> Freezer:
            check_arguments(optimizer, steps_per_epoch, num_epochs, op, gradient_predivide_factor)
            chain = in_blocks(model, blocks=blocks, example=example)
            reducer = reducer_of(self.world, optimizer, chain, compression=compression, passes=backward_passes_per_step)
            cadence = Cadence.of(settings, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs)
            return Freezer(
                chain,
                optimizer=optimizer,
                reducer=reducer,
                world=self.world,
                settings=settings,
                cadence=cadence,
                voter=voter,
            )

        self.freezer = together(self.world, build, name="optimizer")
        self.reducer = self.freezer.reducer
        check_equal(self.world, "models", {"blocks": [block.name for block in self.freezer.chain.blocks]})
        self._synchronized, self._skips, self._began, self._created = False, False, False, False
        self._loss = math.nan

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; in any place but between a backward pass and `synchronize` or `step`.

        Raises:
            UsageError: gradients of this step are on their way already.
        """
        if self.reducer.exchanging:
            raise UsageError(
                "zero_grad() between backward() and step(): the gradients are on their way to the other ranks; call it "
                "before the backward pass or after step()"
            )
        self._inner.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> None:
        """Wait until every gradient is the average over ranks: before gradients are clipped, for example.

        Collective: every rank must call this, at most once between its backward passes and `step`.

        Raises:
            DivergedError: ranks began with different parameters, or have frozen different ones.
        """
        if not self._began:
            self._began = True
            begin_alike(self._inner, self.freezer.chain, self.world, created=self._created)
        self.reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let a `step` inside take the gradients as `synchronize` and the script have left them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def report_loss(self, loss: float) -> None:
        """Tell this step's mean loss, before `step`; needed where votes are weighted by the loss."""
        self._loss = float(loss)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averaged gradients, update the parameters that train, and vote when a vote is due.

        Collective: every rank must call this, with as many steps as the others.

        Args:
            closure: as the wrapped optimizer's; it makes the backward pass.

        Returns:
            What the wrapped optimizer's `step` returns.

        Raises:
            UsageError: `skip_synchronize` without `synchronize`, or a vote weighted by the loss without `report_loss`.
        """
        if not self._began and not self.reducer.exchanging and called_by_broadcast():
            create_state(self._inner, self.world)
            self._created = self.world.size > 1
            return None
        if closure is None:
            self._average()
            result = self._inner.step()
        else:
            result = self._inner.step(lambda: self._averaged(closure))
        self._synchronized = False
        self._vote()
        return result

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect so many backward passes before each `step` from now on."""
        self.reducer.backward_passes_per_step = passes

    def freezer_state_dict(self) -> dict[str, Any]:
        """Return this rank's cut, its history and what it observed since the last vote. Not a collective."""
        state = {"freezer": self.freezer.state_dict(), "reducer": self.reducer.state_dict()}
        return {"rank": self.world.rank, "size": self.world.size, **state}

    def load_freezer_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the cut that `freezer_state_dict` found; before or after the model and the optimizer are loaded.

        Exact where every rank loads its own. Where all load one rank's, what was observed since the last vote counts
        no more. Collective: every rank must call this.
        """
        mine = [state["rank"], state["size"]] == [self.world.rank, self.world.size]
        whole = all(self.world.allgather_object(mine, name="freezer.load"))
        frozen = state["freezer"]
        self.freezer.load_state_dict(frozen if whole else Freezer.redealt(frozen, restep=lambda step: step))
        if whole:
            self.reducer.load_state_dict(state["reducer"])
        self._began = True

    def _average(self) -> None:
        if self._synchronized and not self.reducer.exchanging:
            return
        if self._skips and self.world.size > 1:
            raise UsageError(
                "step() inside skip_synchronize() without synchronize() before it: each rank would follow its own "
                "gradients; call synchronize() first"
            )
        self.synchronize()

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._average()
        return loss

    def _vote(self) -> None:
        if self.freezer.settings.vote_weight == "loss" and math.isnan(self._loss):
            raise UsageError(
                "--vote-weight (loss) needs the loss: call optimizer.report_loss(loss.item()) before step()"
            )
        decision = self.freezer.after_step(self._loss)
        self._loss = math.nan
        if decision is not None and self.world.rank == 0:
            names = ", ".join(block.name for block in self.freezer.chain.blocks[: decision.cut_after])
            logger.info("step %d: frozen: %s (%s)", decision.step, names or "nothing", decision.reason)
