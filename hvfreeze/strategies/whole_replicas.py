"""The common part of strategies whose ranks hold equal copies of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvfreeze.allocator import give_back
from hvfreeze.comm.replica_sync import check_replicas, non_persistent_buffers
from hvfreeze.comm.world import World
from hvfreeze.data.batches import Batch
from hvfreeze.prefix.features import Features, Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.base import MODEL, Answers, WholeModel


@dataclass(eq=False, kw_only=True)
class WholeReplicas:
    """The common part of strategies whose ranks hold equal copies of the whole model; see `OpenModel`."""

    models: ClassVar[Sequence[str]] = (MODEL,)
    world: World
    """The ranks whose copies are equal."""
    halves: Halves
    training: Features
    evaluation: Features
    clock: PhaseClock
    """Seconds of a step by phase."""
    _began: bool = False
    """Whether `take_place` has set the features to the cut; earlier changes of the cut wait for it."""

    def __post_init__(self) -> None:
        self.chain = self.halves.chain

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches. Collective."""
        self.take_place()
        (self.training if training else self.evaluation).begin_epoch(batches)

    def take_place(self) -> None:
        """Set the features to the initial cut, once the model has its initial state. Collective."""
        if not self._began:
            self._began = True
            give_back()
            self._follow_cut()

    def predict(self, batch: Batch) -> dict[str, Answers]:
        """Return the logits of an evaluation batch. Not a collective."""
        self.halves.be_in_mode(training=False)
        with torch.no_grad():
            logits = self.halves.suffix(self.evaluation.of(batch), self.evaluation.cut).float()
        return {MODEL: Answers(logits, batch.labels)}

    def check(self, *, step: int) -> str:
        """Return the digest of the model; raises if copies differ. Collective."""
        return check_replicas(self.chain.model, self.world, step=step)

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield the model, which every rank holds."""
        yield WholeModel(MODEL, self.chain.model.state_dict())

    def close(self) -> None:
        """Publish cached rows and close all files."""
        self.training.close()
        self.evaluation.close()

    def _model_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the model for a checkpoint: its state_dict, and the buffers that this omits."""
        model = self.chain.model
        return {"model": model.state_dict(), "buffers": non_persistent_buffers(model)}

    def _load_model(self, shared: Mapping[str, Any]) -> None:
        """Load `_model_state`."""
        model = self.chain.model
        model.load_state_dict(shared["model"])
        own = dict(model.named_buffers())
        # Checkpoints of earlier versions have none, and another version of a library may have others. The shape may
        # have changed in training.
        for name, saved in shared.get("buffers", {}).items():
            if name in own:
                own[name].data = saved.clone()

    def _cuts(self) -> Sequence[int]:
        """Return the cuts so far, the current one last."""
        raise NotImplementedError

    def _follow_cut(self) -> None:
        """Update both splits' activations after a change of the cut. Collective."""
        for features in (self.training, self.evaluation):
            features.move(self._cuts())
