"""Local critic training as one process does it: what layer groups on several ranks must equal.

The rule of Lee et al. ("Local Critic Training for Model-Parallel Learning of Deep Neural Networks", 2018, arXiv
1805.01128), written with PyTorch and nothing of the strategy. Behind every layer group but the last, a critic gives
logits, and their cross-entropy is an estimate of the whole network's loss. A group descends the mean of its own
critic's estimate; nothing comes back from later groups. A critic descends the mean absolute difference between its
estimates and the next ones, sample by sample; the last critic's next ones are the true losses. Everything is computed
before anything is updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class LocalCritics:
    """Layer groups and critics in one process.

    Args:
        groups: the network's parts, in forward order; the last gives logits.
        critics: one behind each group but the last, from its output to logits.
        critic_every: critics learn from every so many batches, the first one of them included.
        critic_lr: of Adam, by which they learn.
        smoothing: part of each label that is spread evenly over all classes.
        options: of the groups' optimizer, SGD.
    """

    def __init__(
        self,
        groups: Sequence[nn.Module],
        critics: Sequence[nn.Module],
        *,
        critic_every: int,
        critic_lr: float,
        smoothing: float = 0.0,
        **options: float,
    ) -> None:
        self.groups, self.critics, self.critic_every, self._steps = groups, critics, critic_every, 0
        self._loss = partial(cross_entropy, label_smoothing=smoothing)
        self.optimizers = [torch.optim.SGD(group.parameters(), **options) for group in groups]  # type: ignore[arg-type]
        self.critic_optimizers = [torch.optim.Adam(critic.parameters(), lr=critic_lr) for critic in critics]

    def step(self, images: Tensor, labels: Tensor) -> list[float]:
        """Make a step; return every group's mean loss, the last of which is the network's own."""
        outputs, estimates = [], []
        for group in self.groups:
            outputs.append(group.train()(images))
            images = outputs[-1].detach()
        for output, critic in zip(outputs, self.critics):
            estimates.append(self._loss(critic(output), labels, reduction="none"))
        losses = [*[each.mean() for each in estimates], self._loss(outputs[-1], labels)]
        trues = [*estimates, self._loss(outputs[-1], labels, reduction="none")]
        gradients = [
            torch.autograd.grad(loss, list(group.parameters()), retain_graph=True)
            for group, loss in zip(self.groups, losses, strict=True)
        ]
        errors = [(own - later.detach()).abs().mean() for own, later in pairwise(trues)]
        critic_gradients = [
            torch.autograd.grad(error, list(critic.parameters()))
            for critic, error in zip(self.critics, errors, strict=True)
        ]
        for module, found in zip([*self.groups, *self.critics], [*gradients, *critic_gradients], strict=True):
            for parameter, gradient in zip(module.parameters(), found, strict=True):
                parameter.grad = gradient
        learns = self._steps % self.critic_every == 0
        for optimizer in [*self.optimizers, *(self.critic_optimizers if learns else [])]:
            optimizer.step()
        self._steps += 1
        return [loss.item() for loss in losses]
