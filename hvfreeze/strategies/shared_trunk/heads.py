"""One model's own part: its last blocks, its optimizer and its random state. It lives on one rank alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import drop_tensors
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.freezing.frozen import hold_in_eval
from hvfreeze.prefix.features import Halves
from hvfreeze.runs.clock import PhaseClock
from hvfreeze.strategies.shared_trunk.labels import Labels
from hvfreeze.strategies.shared_trunk.tasks import Task
from hvfreeze.strategies.strategy import Answers
from hvfreeze.updates.objective import Mixture, Objective
from hvfreeze.updates.update import Update, open_optimizer

BuildChain = Callable[[int], Chain]
"""Number of classes -> the model in blocks, initialised from torch's generator."""


class Head:
    """Trains the last blocks of a model on features that somebody computes.

    What it draws at random, dropout, comes from its own seed, so that it is the same wherever it is trained.
    """

    def __init__(self, task: Task, labels: Labels, settings: OptimizerConfig, *, build: BuildChain) -> None:
        self.task, self.labels = task, labels
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            chain = build(len(labels.classes))
            torch.manual_seed(task.seed)
            self._random = torch.get_rng_state()
        self.depth = len(chain.blocks) - task.blocks
        self.blocks = len(chain.blocks)
        drop_tensors(chain, 0, self.depth)
        self.chain, self._halves = chain, Halves(chain, settings.precision)
        self.optimizer = open_optimizer(chain.named_parameters(self.depth), settings, lr=task.lr)
        self._update = Update(self.optimizer, settings)
        self._objective = Objective(smoothing=settings.label_smoothing)
        self._weights = labels.weights(task.loss)

    def train(self, features: Tensor, labels: Tensor, clock: PhaseClock) -> tuple[float, Answers]:
        """Compute the gradients of a batch; return its mean loss and the answers from before the update."""
        clock.enter("forward")
        self._halves.be_in_mode(training=True)
        before = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            logits = self._halves.suffix(features, self.depth).float()
            loss = self._objective.loss(logits, Mixture(features, labels), self._weights)
            clock.enter("backward")
            self.optimizer.zero_grad()
            loss.backward()
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(before)
        return loss.item(), Answers(logits.detach(), labels)

    def is_finite(self, loss: float) -> bool:
        """Tell whether the loss and all gradients are."""
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def update(self, rate: float) -> None:
        """Make the optimizer's step; `rate` is what --lr has become by --schedule, which this head's follows."""
        self._update.make(rate)

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits of a batch in evaluation mode."""
        self._halves.be_in_mode(training=False)
        with torch.no_grad():
            return self._halves.suffix(features, self.depth).float()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers of the head's own blocks."""
        return [*self.chain.named_parameters(self.depth), *self.chain.named_buffers(self.depth)]

    def state_dict(self) -> dict[str, Any]:
        """Return what must be kept so that training goes on bit for bit."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors()}
        return {"tensors": tensors, "optimizer": self.optimizer.state_dict(), "random": self._random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same head."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                tensor.copy_(state["tensors"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._random = state["random"]


def hold_still(chain: Chain, segment: tuple[int, int]) -> None:
    """Make blocks lo..hi-1 a pure function of their input, for good."""
    for module in chain.modules(*segment):
        hold_in_eval(module)
    for _, parameter in chain.named_parameters(*segment):
        parameter.requires_grad_(False)
