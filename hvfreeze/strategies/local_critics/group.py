"""One layer group and its critic, and how they learn on any rank.

    input -> group -> output -> critic -> logits -> losses, (B,)     the critic's estimate of the whole model's losses
             group <- gradient <- critic <--------- mean             updates the group, at once
                                critic <- mean |losses - next|       updates the critic, once the next losses are there

The next group's losses are its critic's estimates, or the true ones if it is the last. Only losses are sent back.
Source: Lee et al., "Local Critic Training for Model-Parallel Learning of Deep Neural Networks", arXiv 1805.01128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.model.blocks import Chain
from hvfreeze.model.early_exits import CRITICS
from hvfreeze.model.modes import in_precision
from hvfreeze.model.segments import Segment, tensors_of
from hvfreeze.optim import Mixture, Objective, open_optimizer
from hvfreeze.prefix.features import Halves
from hvfreeze.strategies.model_parallel import LocalPart
from hvfreeze.tasks import Samples, Task


@dataclass(frozen=True)
class GroupPlan:
    """The group's blocks in the chain, and its random seed."""

    number: int
    blocks: Segment
    """All blocks of the group."""
    start: int
    """The first trained block; those before it are frozen."""
    seed: int
    """Seed of dropout: each group has its own generator, so results do not depend on the group's rank."""


class LayerGroup(LocalPart):
    """Trains one group of blocks and the critic behind it.

    Call `forward`, `estimate`, `backward` and `update` for each batch, in this order, and `learn` if the critic must
    learn from it, any time before the next batch's `estimate`.

    Args:
        plan: the group's blocks.
        chain: has the group's blocks.
        critic: from the group's output to logits; None for the last group, whose output is logits.
        settings: of the group's optimizer.
        critic_lr: learning rate of the critic's Adam.
        task: what the exits answer.
    """

    def __init__(
        self,
        plan: GroupPlan,
        chain: Chain,
        critic: nn.Module | None,
        settings: OptimizerConfig,
        *,
        critic_lr: float,
        task: Task,
    ) -> None:
        self.plan, self.critic, self._chain, self._halves = plan, critic, chain, Halves(chain, settings.precision)
        named = chain.named_parameters(plan.start, plan.blocks[1])
        last = critic is None
        head = {name for name, _ in chain.named_parameters(len(chain.blocks) - 1)} if last else set[str]()
        super().__init__(open_optimizer(named, settings, head=head), settings, seed=plan.seed)
        self._objective = Objective(task=task, smoothing=settings.label_smoothing)
        self._weights = [] if critic is None else list(critic.parameters())
        self.critic_optimizer = torch.optim.Adam(self._weights, lr=critic_lr) if critic is not None else None
        self._output = self._loss = self._losses = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for `x`, which has passed the frozen blocks; without gradient."""
        with self.own_draws():
            self._output = self._halves.part(x, self.plan.start, self.plan.blocks[1])
        return self._output.detach()

    def estimate(self, labels: Tensor, samples: Samples) -> Tensor:
        """Return the losses of the forwarded batch, (B,) float32: estimates, or the true ones in the last group."""
        if self.critic is None:
            logits = self._output.float()
            self._loss = self._objective.loss(logits, Mixture(logits, labels, samples))
            return self._objective.each(logits.detach(), labels, samples)
        inner = self._output.detach().requires_grad_()
        self._losses = self._objective.each(self.answer(inner), labels, samples)
        self._loss = self._losses.mean()
        # The critic's own gradients are of another loss.
        (self._error,) = torch.autograd.grad(self._loss, inner, retain_graph=True)
        return self._losses.detach()

    @property
    def loss(self) -> float:
        """The mean of the losses that `estimate` returned."""
        return self._loss.item()

    @property
    def logits(self) -> Tensor:
        """On the last group, the logits of the forwarded batch, (B, classes) float32."""
        return self._output.detach().float()

    def backward(self) -> None:
        """Compute the gradients of the group's trained blocks."""
        self.optimizer.zero_grad()
        if self.critic is None:
            self._loss.backward()
        else:
            self._output.backward(self._error)

    def learn(self, losses: Tensor) -> None:
        """Update the critic with the next group's losses, (B,), of the same batch."""
        assert self.critic_optimizer is not None, "the last group has no critic"
        error = (self._losses - losses).abs().mean()
        for parameter, gradient in zip(self._weights, torch.autograd.grad(error, self._weights), strict=True):
            parameter.grad = gradient
        self.critic_optimizer.step()

    def answer(self, output: Tensor) -> Tensor:
        """Return the logits, (B, classes) float32, of the exit behind this group, given its output."""
        if self.critic is None:
            return output.float()
        with in_precision(self._halves.precision):
            logits: Tensor = self.critic(output)
        return logits.float()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers of the group's blocks, and of its critic, as a submodule of the model."""
        own = [] if self.critic is None else list(self.critic.named_parameters())
        return [
            *tensors_of(self._chain, self.plan.blocks),
            *[(f"{CRITICS}.{self.plan.number}.{name}", tensor) for name, tensor in own],
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the group continues bit for bit; the critic's pending update must be done."""
        critic = None if self.critic_optimizer is None else self.critic_optimizer.state_dict()
        return {**super().state_dict(), "critic_optimizer": critic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same group."""
        super().load_state_dict(state)
        if self.critic_optimizer is not None:
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])
