"""The loss of multinomial logistic regression and its gradient over all ranks: one pass over the rows, one allreduce.

Rank 0 leads: it alone decides where to evaluate next, and keeps what the minimiser remembers. The other ranks follow,
so no decision rests on numbers that processors of different makes could round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvfreeze.heads.rows import Rows
from hvfreeze.heads.solution import Stopped
from hvfreeze.heads.standard import Standard
from hvfreeze.ranks.world import World

STOP, WITHOUT_HELD_OUT, WITH_ALL = 0.0, 1.0, 2.0
"""What rank 0 asks the others to do with the weights that it sends."""


@dataclass(frozen=True)
class Point:
    """The mean loss over the fitted rows of all ranks at one point, without a penalty.

    Attributes:
        weights: (C, D + 1) float64, for standardised features; the last column is the intercept.
        loss: mean over the fitted rows, in nats.
        gradient: (C, D + 1) float64.
        curvature: mean of p (1 - p) over fitted rows and classes: how strongly the loss bends here, at most 1/4.
        held_out_loss: mean over the held-out rows; NaN without any.
        held_out_accuracy: 0 to 1; NaN without any.
    """

    weights: Tensor
    loss: float
    gradient: Tensor
    curvature: float
    held_out_loss: float
    held_out_accuracy: float


class SoftmaxLoss:
    """The mean of -log p(label) over the rows of all ranks, p = softmax(weights . [standardised features, 1]).

    Products are float32, sums over chunks and ranks float64.
    """

    def __init__(
        self, rows: Rows, standard: Standard, *, classes: int, world: World, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._rows = rows
        self._standard = standard
        self._world = world
        self._stop = stop
        self.shape = (classes, rows.width + 1)
        self.passes = 0
        self.exchanged_bytes = 0

    def at(self, weights: Tensor, *, held_out: bool) -> Point:
        """Return the loss at `weights`, fitted without the held-out rows where `held_out` is true.

        Collective: rank 0 calls this while every other rank of the world is in `follow`.

        Raises:
            Stopped: some rank wants to stop; on rank 0, and `follow` is then still to be ended.
        """
        command = WITHOUT_HELD_OUT if held_out else WITH_ALL
        self._tell(command, weights)
        point, stopped = self._evaluate(weights, command)
        if stopped:
            raise Stopped
        return point

    def zero(self) -> Tensor:
        """Return weights of zero, (C, D + 1) float64."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def stop(self) -> None:
        """End the other ranks' `follow`. Collective: rank 0 calls this."""
        self._tell(STOP, self.zero())

    def follow(self) -> None:
        """Take part in every evaluation that rank 0 asks for, until it stops. Collective: all ranks but 0 call this."""
        command, weights = self._hear()
        while command != STOP:
            self._evaluate(weights, command)
            command, weights = self._hear()

    def _tell(self, command: float, weights: Tensor) -> None:
        message = torch.cat([torch.tensor([command], dtype=torch.float64), weights.flatten()])
        self._world.broadcast_(message, name="head.weights")

    def _hear(self) -> tuple[float, Tensor]:
        message = torch.empty(1 + math.prod(self.shape), dtype=torch.float64)
        self._world.broadcast_(message, name="head.weights")
        return float(message[0]), message[1:].view(self.shape)

    def _evaluate(self, weights: Tensor, command: float) -> tuple[Point, bool]:
        self.passes += 1
        mine = self._local_sums(weights, command)
        self.exchanged_bytes += mine.numel() * mine.element_size() if self._world.size > 1 else 0
        sums = self._world.allreduce_sum(mine, name="head.loss")
        loss, count, held_loss, held_right, held_count, curvature = sums[:6].tolist()
        stopped = bool(sums[6])
        raw = sums[7:].view(self.shape)
        gradient = torch.empty_like(raw)
        # d/dW of standardised features, from sums over raw ones.
        gradient[:, :-1] = (raw[:, :-1] - raw[:, -1:] * self._standard.offset) * self._standard.scale / count
        gradient[:, -1] = raw[:, -1] / count
        nothing = held_count == 0
        point = Point(
            weights,
            loss / count,
            gradient,
            curvature / (count * self.shape[0]),
            math.nan if nothing else held_loss / held_count,
            math.nan if nothing else held_right / held_count,
        )
        return point, stopped

    def _local_sums(self, weights: Tensor, command: float) -> Tensor:
        """Return this rank's sums: seven numbers, then the gradient for raw features and the intercept."""
        weight, bias = self._standard.folded(weights, mean=self._standard.offset)
        weight, bias = weight.float(), bias.float()[:, None]
        result = torch.zeros(7 + math.prod(self.shape), dtype=torch.float64)
        numbers, gradient = result[:6], result[7:].view(self.shape)
        result[6] = self._stop()
        for chunk in self._rows.chunks():
            features = self._standard.taken(chunk.features)
            held = chunk.held_out if command == WITHOUT_HELD_OUT else torch.zeros_like(chunk.held_out)
            fitted = (~held).float()
            # Classes first: this order of the product is twice as fast for few classes.
            logits = torch.addmm(bias, weight, features.t())
            logs = logits.log_softmax(0)
            losses = -logs.gather(0, chunk.labels[None])[0]
            right = logits.argmax(0) == chunk.labels
            residuals = logs.exp_()
            bends = (residuals - residuals.square()).sum(0)
            numbers += _sums(
                losses * fitted, fitted, losses * held, (right & held).float(), held.float(), bends * fitted
            )
            residuals[chunk.labels, torch.arange(len(chunk.labels))] -= 1
            residuals *= fitted
            gradient[:, :-1] += residuals @ features
            gradient[:, -1] += residuals.sum(1, dtype=torch.float64)
        return result


def _sums(*columns: Tensor) -> Tensor:
    return torch.stack(columns).sum(1, dtype=torch.float64)
