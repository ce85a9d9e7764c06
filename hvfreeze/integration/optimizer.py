"""`hvfreeze.DistributedOptimizer`: replaces `hvd.DistributedOptimizer` and freezes blocks by vote.

    optimizer = hvfreeze.DistributedOptimizer(optimizer, model=model)

The rest of the script stays the same. A backward pass sends gradients as they become ready. `step` waits for their
average, updates, and votes when a vote is due.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.allocator import advice
from hvfreeze.comm.agreement import check_equal, raise_on_all_ranks
from hvfreeze.comm.gradient_exchange import sparse_parameters
from hvfreeze.comm.script_reducer import ScriptReducer
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.frozen_prefix import give_buffers
from hvfreeze.freezing.vote import Decision, Voter
from hvfreeze.integration.changed_elsewhere import ChangedElsewhere
from hvfreeze.integration.epoch_length import EpochLength
from hvfreeze.integration.found_blocks import FoundBlocks
from hvfreeze.integration.horovod_compat import (
    beside,
    check_arguments,
    check_groups,
    compression_of,
    create_state,
    is_broadcast,
    names_of,
    scaling_of,
    synchronize_start,
)
from hvfreeze.integration.loss_scale import LossScale, step_scaled
from hvfreeze.integration.script_world import log, report_errors, script_world
from hvfreeze.model.blocks import Chain
from hvfreeze.model.traced import Inputs
from hvfreeze.runs.reading import Move
from hvfreeze.wording import plural

ADDED_GROUP = (
    "add_param_group() must be called before DistributedOptimizer, because ranks have agreed on the parameters to "
    "exchange. Pass all groups first, with requires_grad_(False) for parameters that train later; or add the group "
    "to the wrapped optimizer, and wrap it again: DistributedOptimizer(optimizer, model=model)"
)
_made = 0
"""Number of optimizers created in this process."""
_alive: list[weakref.ref[DistributedOptimizer]] = []
"""Optimizers in the order of creation. On all ranks, hooks on its parameters keep each alive as long as the
parameters."""


def _agreed_title(world: World) -> str:
    """Return the prefix of the names of an optimizer's messages, unique among these ranks. Collective."""
    global _made
    number = max(world.allgather_object(_made, name="optimizer.number"))
    _made = number + 1
    return f"optimizer-{number}." if number else ""


def _release_earlier(optimizer: DistributedOptimizer) -> None:
    """Release earlier optimizers with some of the same parameters, because two would average the same gradients twice.

    A script may wrap parameters again, e.g. for another phase of training.
    """
    own = optimizer.parameters()
    for reference in list(_alive):
        earlier = reference()
        if earlier is None or earlier.parameters() & own:
            _alive.remove(reference)
            if earlier is not None:
                earlier.release()


def _outline(model: nn.Module, chain: Chain) -> dict[str, Any]:
    """Return what must be equal on all ranks: the names of blocks, and each parameter's type and shape."""
    shapes = {name: f"{str(p.dtype)[6:]} {list(p.shape)}" for name, p in model.named_parameters()}
    return {"blocks": [block.name for block in chain.blocks], "parameter": shapes}


def outcome(decision: Decision, chain: Chain) -> str:
    """Return what a vote has frozen or thawed, and why."""
    names = [block.name for block in chain.blocks]
    frozen = f"frozen: {', '.join(names[: decision.cut_after]) or 'nothing'} ({decision.reason})"
    thawed = range(decision.cut_after, decision.cut_before)
    if not thawed:
        return frozen
    columns = {block: [row[block] for row in decision.gains if row[block] is not None] for block in thawed}
    parts = {block: f" (gains {' '.join(f'{part:.3f}' for part in of)})" if of else "" for block, of in columns.items()}
    return f"thawed: {', '.join(names[block] + parts[block] for block in thawed)}; {frozen}"


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer with the groups, state and state_dict of the one that it wraps; frozen parameters have no state."""

    freezer: Freezer

    def _stand_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Initialise in place of `Optimizer.__init__`, which would create separate groups."""
        self._inner = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict, with every parameter in its group; frozen ones have no state."""
        with self.freezer.prefix.all_parameters():
            return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, which may have been saved without hvfreeze."""
        with self.freezer.prefix.all_parameters():
            self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError: all ranks have agreed on the parameters to exchange."""
        raise UsageError(ADDED_GROUP)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UsageError: a copy, pickled or not, would average this one's gradients."""
        raise UsageError("a DistributedOptimizer cannot be copied, pickled or saved as a whole; save its state_dict()")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, with the parameters that are not frozen."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "freezer"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"


class DistributedOptimizer(OptimizerWrapper):
    """Wraps any torch optimizer: averages gradients over ranks, and freezes and thaws front blocks by vote.

    It has the wrapped optimizer's groups, state, state_dict and methods. With one process, steps are PyTorch's, bit for
    bit, until a block is frozen. As with several, more than one backward pass per `step` needs
    `backward_passes_per_step`.

    Rank 0 logs the first vote and each change of the cut by the logger `hvfreeze`, and other votes at level DEBUG. If
    the script has configured no logging, lines go to standard error.

    The constructor divides `model` into blocks if that is possible without running it, and starts Horovod if the script
    has not. Other models are divided by the modules that their first forward pass in training calls, on rank 0 for all
    ranks. A model with fewer than two blocks is trained without freezing, which is logged. Collective: every rank of
    the job must create one.

    Args:
        optimizer: any torch optimizer except LBFGS, over parameters of `model` or others. A script may switch
            `requires_grad` off and on between steps.
        named_parameters: as in Horovod, with the same checks; not needed, because `model` has the names.
        compression: none, fp16 or powersgd:R, or Horovod's own `hvd.Compression.fp16`.
        backward_passes_per_step: backward passes before each `step`, whose gradients are accumulated.
        op: `hvd.Average` (or None) or `hvd.Sum`.
        gradient_predivide_factor: as in Horovod: gradients are divided by it before they are summed, and their sum by
            the number of ranks over it.
        num_groups: as `groups`.
        groups: as in Horovod, with the same checks; without effect, because gradients are exchanged in buckets anyway.
        sparse_as_dense: as in Horovod: sparse gradients are exchanged dense.
        process_set: as in Horovod: the ranks that exchange gradients and vote. Other ranks train alone, without
            freezing.
        model: any module; the script trains it by calling it as before.
        steps_per_epoch: optimizer steps per epoch, equal on all ranks. By default the length of the DataLoader that the
            script reads in its first step, on rank 0; if that has no length, the steps of the first pass. Votes are
            held twice an epoch, or every `INTERVAL_STEPS` steps if the epoch length is unknown. Criteria that follow a
            schedule need it.
        num_epochs: length of training; criteria that follow a schedule need it.
        blocks: where the model may be cut: `stage`, `residual`, or names of submodules that start a block, in forward
            order, as NAME,NAME,... or a list.
        example: a batch of the model's inputs, a tensor, a tuple or a dict. The model runs on it once, to find the
            blocks in the constructor.
        settings: criterion, guards, weights and quorum of the votes. The criterion is coherence if other settings are
            given but not `freeze`; `FreezeConfig()` and `freeze="none"` hold no votes.
        voter: this rank's shard, for votes weighted by it.
        world: the ranks; None is all ranks of the job.

    Attributes:
        freezer: the `Freezer`; `freezer.cut` is the number of frozen blocks.
        world: the ranks that exchange gradients and vote.

    Raises:
        UsageError: the settings do not fit the model or the world, or differ between ranks.
        ArgumentError: `named_parameters` lacks parameters or repeats a name; it is a ValueError, as Horovod's is.
    """

    _step_supports_amp_scaling = True
    """PyTorch's protocol: `GradScaler.step` sets `grad_scale` and `found_inf` before it calls `step`."""
    _synchronized = False
    """Whether this step's gradients are already averaged."""
    _skips = False
    """Whether the script is inside `skip_synchronize`."""
    _began = False
    """Whether ranks are known to have started with equal parameters."""
    _created: frozenset[Tensor] = frozenset()
    """Parameters whose state was created for `hvd.broadcast_optimizer_state`."""
    _told = False
    """Whether a vote has been logged."""
    _loss: float | None = None
    """This step's loss, if the script has reported it."""
    _elsewhere: ChangedElsewhere | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Any = None,
        compression: Any = "none",
        backward_passes_per_step: int = 1,
        op: Any = None,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = None,
        *,
        model: nn.Module,
        steps_per_epoch: int | None = None,
        num_epochs: int | None = None,
        blocks: str | Sequence[str] | None = None,
        example: Inputs | None = None,
        settings: FreezeConfig = FreezeConfig(freeze="coherence"),  # noqa: B008  (frozen)
        voter: Voter = Voter(),  # noqa: B008  (frozen)
        world: World | None = None,
    ) -> None:
        self._stand_for(optimizer)
        self._model, self.world = model, script_world(process_set) if world is None else world
        report_errors(self.world)
        settings = settings.of_script()
        if process_set is not None and not process_set.included():
            settings = FreezeConfig()
        length = {"steps_per_epoch": steps_per_epoch, "num_epochs": num_epochs}
        passes = backward_passes_per_step
        title = _agreed_title(self.world)
        if world is None and not title and advice():
            log(self.world, advice())
        check_equal(self.world, "arguments", {**length, "passes": passes, **dataclasses.asdict(settings)})

        def build() -> Freezer:
            check_arguments(optimizer, settings, **length, passes=passes)
            check_groups(groups, num_groups)
            self._parameter_names = names_of(optimizer, named_parameters)
            self._blocks = FoundBlocks(
                model, self.world, trained=self.parameters(), blocks=blocks, example=example, settings=settings
            )
            self.reducer = ScriptReducer(
                self.world,
                compression=compression_of(compression),
                backward_passes_per_step=passes,
                title=title,
                scaling=scaling_of(op, gradient_predivide_factor, size=self.world.size),
                sparse=frozenset() if sparse_as_dense else sparse_parameters(model),
                always=beside(optimizer, model),
            )
            _release_earlier(self)  # before anything is frozen here: what an earlier one has frozen trains again
            return Freezer(
                self._blocks.chain,
                optimizer=optimizer,
                reducer=self.reducer,
                world=self.world,
                settings=settings,
                cadence=Cadence.of(settings, steps_per_epoch=steps_per_epoch, num_epochs=num_epochs),
                voter=voter,
                probes_in_steps=True,
            )

        self.freezer = raise_on_all_ranks(self.world, build, name="optimizer")
        self.reducer.owner = self
        self._loss_scale = LossScale(optimizer)
        _alive.append(weakref.ref(self))
        check_equal(self.world, "models", _outline(model, self.freezer.chain))
        self._num_epochs = num_epochs
        self._epoch = EpochLength() if settings.votes and steps_per_epoch is None else None
        if not self._blocks.warn_if_single():
            self._log_plan()
        if groups is not None or num_groups:
            log(self.world, "groups has no effect: gradients are exchanged in buckets of a few MiB")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, which may have been saved without hvfreeze."""
        super().load_state_dict(state_dict)
        give_buffers(
            self._inner, {parameter for parameter in self.parameters() if not self._inner.state.get(parameter)}
        )
        self._created = frozenset()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict, with every parameter in its group; frozen ones have no state."""
        if self._inner.state and is_broadcast():
            # Ranks that have loaded no state create all of it; blocks that were frozen when it was saved have none.
            self._create_state()
        return super().state_dict()

    def parameters(self) -> set[Tensor]:
        """Return all parameters that it updates, including frozen ones."""
        made = "freezer" in vars(self)
        groups = self.freezer.prefix.groups if made else [group["params"] for group in self._inner.param_groups]
        return {parameter for group in groups for parameter in group}

    def release(self) -> None:
        """Release all parameters, unfrozen; `step` is refused afterwards."""
        if self.freezer.cut:
            self.freezer.prefix.move(Move(0, self.freezer.step, 0))
        self.reducer.release()
        self._loss_scale.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; not allowed between a backward pass and `synchronize` or `step`.

        Raises:
            UsageError: gradients of this step are already being averaged.
        """
        if self.reducer.exchanging:
            raise UsageError(
                "zero_grad() must not be called between backward() and step(), because the gradients are being "
                "averaged; call it before the backward pass or after step()"
            )
        self._inner.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> None:
        """Wait until every gradient is the average over ranks, e.g. before gradients are clipped.

        Collective: every rank must call this, at most once between its backward passes and `step`.

        Raises:
            DivergedError: ranks train different parameters.
            UsageError: the wrapped optimizer has other groups than when it was wrapped.
        """
        if len(self._inner.param_groups) != len(self.freezer.prefix.groups):
            raise UsageError(ADDED_GROUP)
        if not self._began:
            self._began = True
            named = [*self._model.named_parameters(), *self._model.named_buffers(), *self.reducer.always]
            synchronize_start(self._inner, dict(named), self.world, created=self._created)
        self._learn_epoch()
        self.reducer.finish()
        if self.world.size > 1:
            self._loss_scale.note()
        self.freezer.prefix.stop_again()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make a `step` inside the context use the gradients as `synchronize` and the script have left them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def report_loss(self, loss: float) -> None:
        """Report this step's mean loss, before `step`; needed if votes are weighted by the loss."""
        self._loss = float(loss)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averaged gradients, update the parameters that train, and vote when a vote is due.

        Collective: every rank must call this, and make as many steps as the others.

        Args:
            closure: as for the wrapped optimizer; it runs the backward pass.

        Returns:
            The result of the wrapped optimizer's `step`.

        Raises:
            UsageError: `skip_synchronize` without `synchronize`, or a vote weighted by the loss without `report_loss`.
        """
        if not self.reducer.exchanging and is_broadcast():
            self._create_state()
            return None
        result: Any = None
        scale = 1.0
        found_inf, grad_scale = (vars(self).get(name) for name in ("found_inf", "grad_scale"))
        if closure is not None:
            result = self._inner.step(lambda: self._averaged(closure))
        elif found_inf is None:
            self._average()
            result = self._inner.step()
        else:
            self._average(scaled=True)
            self._synchronized = False
            if found_inf:
                return None
            scale = self._loss_scale.given(grad_scale)
            result = step_scaled(self._inner, grad_scale=grad_scale, found_inf=found_inf)
        self._synchronized = False
        self._vote(scale=scale)
        return result

    def follow_epochs(self, steps: int) -> None:
        """Schedule votes by an epoch length of `steps` on all ranks, unless it is known. Not a collective."""
        if self._epoch is not None:
            self._epoch = None
            settings = self.freezer.settings
            self.freezer.follow_cadence(Cadence.of(settings, steps_per_epoch=steps, num_epochs=self._num_epochs))
            self._log_plan()

    def _learn_epoch(self) -> None:
        """Determine the epoch length while it is unknown. Collective."""
        if self._epoch is None:
            return
        found, waits = None, False
        if self.world.rank == 0:
            found = self._epoch.learn(self.freezer.step, passes=self.reducer.backward_passes_per_step)
            waits = self._epoch.waits
        found, waits = self.world.broadcast_object((found, waits), name="optimizer.epoch")
        if found is not None:
            self.follow_epochs(found)
        elif not waits:
            self._epoch = None
            self._log_plan()

    def _log_plan(self) -> None:
        """Log when votes are held, or the effect of other settings."""
        settings, cadence = self.freezer.settings, self.freezer.cadence
        if settings.freeze == "none":
            log(self.world, "no block will be frozen: settings has freeze 'none'")
        elif not settings.votes:
            log(self.world, "frozen from the start: %s", plural(self.freezer.cut, "block"))
        elif cadence.steps_per_epoch is not None:
            epoch = plural(cadence.steps_per_epoch, "step")
            log(self.world, "votes by %s: %s; an epoch has %s", settings.freeze, cadence.described(), epoch)
        elif self._epoch is not None:
            known = settings.freeze_warmup
            first = "at the end of the first epoch" if known is None else f"after step {known or cadence.interval}"
            log(
                self.world,
                "votes by %s: the first %s; the first step determines the epoch length",
                settings.freeze,
                first,
            )
        else:
            log(
                self.world,
                "votes by %s: %s; the epoch length is unknown; pass steps_per_epoch= for two votes per epoch",
                settings.freeze,
                cadence.described(),
            )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this many backward passes before each `step` from now on."""
        self.reducer.backward_passes_per_step = passes

    def freezer_state_dict(self) -> dict[str, Any]:
        """Return this rank's cut, its history and its observations since the last vote. Not a collective."""
        state = {"freezer": self.freezer.state_dict(), "reducer": self.reducer.state_dict()}
        epoch = self.freezer.cadence.steps_per_epoch
        where = {"rank": self.world.rank, "size": self.world.size, "block_names": self._block_names()}
        return {**where, "blocks": self._blocks.description, "steps_per_epoch": epoch, **state}

    def load_freezer_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `freezer_state_dict`; before or after the model and the optimizer are loaded.

        Exact if every rank loads its own. If all load one rank's, observations since the last vote are dropped.
        Collective: every rank must call this.

        Raises:
            UsageError: the state was saved with other blocks; on all ranks.
        """
        local = [state["rank"], state["size"]] == [self.world.rank, self.world.size]
        whole = all(self.world.allgather_object(local, name="freezer.load"))
        frozen = state["freezer"]
        if state.get("steps_per_epoch") is not None:
            self.follow_epochs(state["steps_per_epoch"])

        def take_blocks() -> None:
            self._blocks.restore(self.freezer, state.get("blocks"))
            # States of earlier versions have no names.
            saved, own = state.get("block_names"), self._block_names()
            if saved not in (None, own):
                raise UsageError(
                    f"the freezer's state has the blocks {', '.join(saved)}, but the model has {', '.join(own)}; pass "
                    "the same blocks= or example= as in the run that saved it, or do not load the freezer's state"
                )
            self.freezer.prefix.refuse(frozen["cut"])

        raise_on_all_ranks(self.world, take_blocks, name="freezer.blocks")
        self.freezer.load_state_dict(frozen if whole else Freezer.redealt(frozen, restep=lambda step: step))
        if whole:
            self.reducer.load_state_dict(state["reducer"])

    def _block_names(self) -> list[str]:
        return [block.name for block in self.freezer.chain.blocks]

    def _create_state(self) -> None:
        created = create_state(self._inner, self.world)
        self._created = self._created.union([] if self._began else created)

    def _average(self, *, scaled: bool = False) -> None:
        if self._synchronized and not self.reducer.exchanging:
            if not self._skips:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are already averaged and will not be averaged again",
                    stacklevel=3,
                )
            return
        if self.world.size > 1 and scaled:
            raise UsageError(
                "GradScaler.step() must follow synchronize(), because it would scale gradients that are being "
                "averaged; call optimizer.synchronize() after the backward pass, and GradScaler.step(optimizer) "
                "inside optimizer.skip_synchronize()"
            )
        if self._skips and self.world.size > 1:
            raise UsageError(
                "step() inside skip_synchronize() must follow synchronize(); without it each rank would use its "
                "own gradients"
            )
        self.synchronize()

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._average()
        return loss

    def _vote(self, *, scale: float) -> None:
        if self.freezer.settings.vote_weight == "loss" and self._loss is None:
            raise UsageError(
                "--vote-weight (loss) needs the loss; call optimizer.report_loss(loss.item()) before step()"
            )
        self._blocks.settle(self.freezer)
        self._respect_other_code()
        decision = self.freezer.after_step(math.nan if self._loss is None else self._loss, scale=scale)
        self._loss = None
        if decision is not None:
            # Most votes change nothing, and training may take thousands.
            level = logging.INFO if decision.moved or not self._told else logging.DEBUG
            self._told = True
            log(self.world, "step %d: %s", decision.step, outcome(decision, self.freezer.chain), level=level)

    def _respect_other_code(self) -> None:
        """Do not freeze blocks whose parameters other code changes, and log that once."""
        if self._elsewhere is None:
            self._elsewhere = ChangedElsewhere(self.freezer.prefix)
        if self.freezer.settings.freeze == "none" or not self.freezer.cadence.votes(self.freezer.step + 1):
            return
        found = self._elsewhere.first()
        if found is not None and (self.freezer.limit is None or found[0] < self.freezer.limit):
            self.freezer.limit, name = found
            log(
                self.world,
                "block %s and later blocks will not be frozen, because other code than this optimizer changes %s",
                self.freezer.chain.blocks[found[0]].name,
                name,
                level=logging.WARNING,
            )
