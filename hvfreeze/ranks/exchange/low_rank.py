"""PowerSGD: a gradient's matrix travels as two thin ones, and what they leave out is added to the next gradient.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization (NeurIPS
2019, arXiv 1905.13727), algorithm 1: one step of power iteration from the last step's Q (warm start), with error
feedback. For a matrix M = gradient + error, n x m: P = mean over ranks of M Q; P made orthonormal; Q = mean of M^T P;
all ranks take P Q^T, and each keeps M - P Q^T, of its own M, as its error. All matrices' P travel in one allreduce and
all Q in another, 4 r (n + m) bytes each step instead of 4 n m.

Replicas stay equal bit for bit because what they are updated by is computed from sums alone, which have the same bits
everywhere. That needs ranks that compute alike: equal processors and threads, which `check_arithmetic` compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.errors import UsageError
from hvfreeze.ranks.exchange.buckets import Send
from hvfreeze.ranks.world import World


@dataclass
class Matrix:
    """One parameter's share of the buffers, all of them views: n x m, but `left` (P) n x r and `right` (Q^T) r x m."""

    error: Tensor
    error_shaped: Tensor
    """The same with the parameter's shape and strides, as is `gradient_shaped`."""
    gradient: Tensor
    gradient_shaped: Tensor
    left: Tensor
    right: Tensor


class LowRank:
    """The matrices of a cut's parameters, with what they keep from step to step.

    Args:
        named: the parameters; `fits` must hold for each.
        slots: the number of each among all that the reducer carries.
        rank: r, how many columns P and Q have.
        before: keeps the errors and factors of the parameters that it shares with this one.
    """

    name = "gradients.low-rank"
    tail_bytes = 0

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        slots: Sequence[int],
        *,
        world: World,
        rank: int,
        before: LowRank | None = None,
    ) -> None:
        self.slots, self.missing, self._world, self._rank = slots, 0, world, rank
        shapes = [matrix_shape(parameter) for _, parameter in named]
        self.flat = torch.zeros(sum(n * m for n, m in shapes))
        self._errors = torch.zeros_like(self.flat)
        self._lefts = torch.zeros(sum(n * rank for n, _ in shapes))
        self._rights = torch.zeros(sum(m * rank for _, m in shapes))
        self._matrices: dict[str, Matrix] = {}
        at, left, right = 0, 0, 0
        for (name, parameter), (n, m) in zip(named, shapes, strict=True):
            layout = (parameter.size(), parameter.stride(), at)
            error, gradient = (whole[at : at + n * m].view(n, m) for whole in (self._errors, self.flat))
            shaped = (self._errors.as_strided(*layout), self.flat.as_strided(*layout))
            p = self._lefts[left : left + n * rank].view(n, rank)
            q = self._rights[right : right + m * rank].view(rank, m)
            q.copy_(torch.randn(m, rank, generator=torch.Generator().manual_seed(seed_of(name))).t())
            self._matrices[name] = Matrix(error, shaped[0], gradient, shaped[1], p, q)
            at, left, right = at + n * m, left + n * rank, right + m * rank
        if before is not None:
            self.load_state_dict(before.state_dict())
        self._in_order = list(self._matrices.values())
        self._handles: list[Any] = []
        self._checked = False

    @property
    def payload_bytes(self) -> int:
        """Bytes of all P, which travel first."""
        return self._lefts.nbytes

    def begin(self) -> None:
        """Wait for all slots again. Collective the first time, which may raise UsageError: see `check_arithmetic`."""
        if not self._checked:
            self.check_arithmetic()
        self._checked, self.missing = True, len(self.slots)

    def lay_down(self, place: int, gradient: Tensor | None) -> Tensor:
        """Take this rank's gradient of the slot at `place`, None for zero; return where the average will be."""
        matrix = self._in_order[place]
        if gradient is not None:
            matrix.error_shaped.add_(gradient)
        torch.mm(matrix.error, matrix.right.t(), out=matrix.left)
        self.missing -= 1
        return matrix.gradient_shaped

    def start(self, send: Send) -> None:
        """Start all P on their way."""
        self._handles = send(self._lefts.mul_(1 / self._world.size), f"{self.name}.left")

    def finish(self, send: Send, wait: Callable[[Any], object]) -> int:
        """Return when the average is where `lay_down` said, and the bytes of all Q."""
        for handle in self._handles:
            wait(handle)
        if not bool(torch.isfinite(self._lefts.sum())):
            # Some rank's gradient is not finite: so is the average, on all ranks, and no error may remember it.
            self.flat.fill_(torch.nan)
            self._errors.zero_()
            return 0
        for matrix in self._in_order:
            matrix.left.copy_(torch.linalg.qr(matrix.left).Q)
            torch.mm(matrix.left.t(), matrix.error, out=matrix.right)
        for handle in send(self._rights.mul_(1 / self._world.size), f"{self.name}.right"):
            wait(handle)
        for matrix in self._in_order:
            torch.mm(matrix.left, matrix.right, out=matrix.gradient)
            matrix.error.sub_(matrix.gradient)
        return self._rights.nbytes

    def check_arithmetic(self) -> None:
        """Refuse ranks that would compute different bits from the same sums. Collective.

        Raises:
            UsageError: names the first rank that differs from rank 0; on all ranks.
        """
        digests = self._world.allgather_object(self._probe(), name=f"{self.name}.probe")
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            error = UsageError(
                f"--compression powersgd:{self._rank}: rank {odd[0]} computes other bits than rank 0 from the same "
                "numbers, and replicas would drift apart; give all ranks equal processors and --threads, or use fp16"
            )
            error.everywhere = True
            raise error

    def _probe(self) -> str:
        """Return a digest of what this rank makes of fixed numbers, in all shapes of its matrices."""
        digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
        for matrix in self._in_order:
            left, right = (torch.rand(thin.shape, generator=generator) - 0.5 for thin in (matrix.left, matrix.right))
            product = torch.mm(torch.linalg.qr(left).Q, right)
            digest.update(product.numpy())
            digest.update(matrix.right.numpy())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's error and all ranks' Q for each parameter, copied."""
        return {
            name: {"error": matrix.error.clone(), "right": matrix.right.clone()}
            for name, matrix in self._matrices.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from the entries of `state` whose parameters are here."""
        for name in self._matrices.keys() & state.keys():
            self._matrices[name].error.copy_(state[name]["error"])
            self._matrices[name].right.copy_(state[name]["right"])


def pool_into(pool: dict[str, dict[str, Tensor]], more: dict[str, dict[str, Tensor]], *, number: int) -> None:
    """Add the `number`-th rank's state to the mean of those before it; all ranks have the same Q."""
    for name, kept in more.items():
        mean = pool[name]["error"]
        mean.add_((kept["error"] - mean) / number)


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return (n, m): the first dimension, and all others together, in the order in which they lie in memory."""
    return parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])


def fits(parameter: Tensor, *, rank: int) -> bool:
    """Tell whether a parameter's gradient is worth compressing, to half at most, and lies in memory row by row."""
    if parameter.dim() < 2 or parameter.dtype != torch.float32:
        return False
    n, m = matrix_shape(parameter)
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    return dense and rank <= min(n, m) and 2 * rank * (n + m) <= n * m


def seed_of(name: str) -> int:
    """Return a seed that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
