"""PowerSGD: sends a gradient matrix as two low-rank factors, and adds the residual to the next gradient.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization (NeurIPS
2019, arXiv 1905.13727), algorithm 1: one step of power iteration from the last step's Q (warm start), with error
feedback. For a matrix M = gradient + error, n x m: P = mean over ranks of M Q; P made orthonormal; Q = mean of M^T P;
all ranks take P Q^T, and each keeps M - P Q^T, of its own M, as its error: 4 r (n + m) bytes each step instead of
4 n m. All P of a group of matrices travel in one allreduce and all their Q in another; the groups that the backward
pass completes first are sent during the rest of it.

Replicas stay bitwise equal because their updates are computed only from sums, which have the same bits on all ranks.
This requires equal arithmetic on all ranks, i.e. equal processors and thread counts; `check_arithmetic` checks it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError

Send = Callable[[Tensor, str], list[Any]]
"""Starts an allreduce of a tensor in pieces under a name; returns the handles."""
Wait = Callable[[Any], object]

ROWS_TOGETHER = 16
WRITTEN_AT_ONCE = 2**18
"""Elements per tile, 1 MiB: a tile stays in the processor's cache between write and read; smaller tiles need more
calls."""
PROJECTED_AT_ONCE = 2**16
"""Elements, 256 KiB: smaller operands are multiplied in their own layout, larger ones are transposed first."""


@dataclass
class Matrix:
    """Views of one parameter's share of the buffers: matrix n x m, `left` (P^T) r x n and `right` (Q^T) r x m.

    Both factors are row-major, because products with few columns are fast on long rows. During a step `error` holds M.
    The shaped views have the parameter's shape and strides.
    """

    error: Tensor
    error_shaped: Tensor
    gradient: Tensor
    gradient_shaped: Tensor
    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        """Allocate the orthonormal P of the last step, n x r, and the views of all row tiles."""
        self.basis = torch.zeros_like(self.left).t()
        self.rows, few = (run_of(self.error.shape[1], size) for size in (WRITTEN_AT_ONCE, PROJECTED_AT_ONCE))
        errors, lefts = self.error.split(self.rows), self.left.split(self.rows, dim=1)
        shaped, transposed = self.error_shaped.split(self.rows), [error.t() for error in errors]
        self._added = list(zip(shaped, transposed, lefts, strict=True))
        self._projected = list(zip(self.basis.t().split(few, dim=1), self.error.split(few), strict=True))
        bases, gradients = self.basis.split(self.rows), self.gradient.split(self.rows)
        self._decompressed = list(zip(bases, gradients, errors, strict=True))

    def add(self, gradient: Tensor | None) -> None:
        """Set `error` to M = gradient + error (a gradient of None is zero), and `left` to (M Q)^T."""
        parts: Sequence[Tensor | None] = [None] * len(self._added) if gradient is None else gradient.split(self.rows)
        for part, (error, transposed, left) in zip(parts, self._added, strict=True):
            if part is not None:
                error.add_(part)
            torch.mm(self.right, transposed, out=left)

    def project(self) -> None:
        """Set `basis` to P, made orthonormal, and `right` to (M^T P)^T."""
        self.basis.copy_(torch.linalg.qr(self.left.t()).Q)
        self.right.zero_()
        for basis, error in self._projected:
            self.right.addmm_(basis, error)

    def decompress(self) -> None:
        """Set `gradient` to P Q^T, and `error` to the residual."""
        for basis, gradient, error in self._decompressed:
            error.sub_(put_product(basis, self.right, gradient))


def run_of(m: int, elements: int) -> int:
    """Return the number of rows of length m with about `elements` elements, a multiple that products are fast for."""
    return max(1, elements // m // ROWS_TOGETHER) * ROWS_TOGETHER


def put_product(left: Tensor, right: Tensor, into: Tensor) -> Tensor:
    """Compute left @ right into `into`, and return it."""
    # With few columns, adding to zeros takes less time than overwriting.
    return into.zero_().addmm_(left, right)


class LowRankBucket:
    """Low-rank matrices of some parameters that are sent together, with their state.

    `fits` must hold for each parameter of `named`. `slots` are their indices among all carried parameters. The mean is
    over `size` ranks. P and Q have `rank` columns.
    """

    tail_bytes = 0

    def __init__(
        self, name: str, named: Sequence[tuple[str, nn.Parameter]], slots: Sequence[int], *, size: int, rank: int
    ) -> None:
        self.name, self.slots, self.missing, self._size = name, slots, 0, size
        shapes = [matrix_shape(parameter) for _, parameter in named]
        self.flat = torch.zeros(sum(n * m for n, m in shapes))
        self._errors = torch.zeros_like(self.flat)
        self._lefts = torch.zeros(sum(n * rank for n, _ in shapes))
        self._rights = torch.zeros(sum(m * rank for _, m in shapes))
        self._matrices: dict[str, Matrix] = {}
        at, left, right = 0, 0, 0
        for (name, parameter), (n, m) in zip(named, shapes, strict=True):
            error, gradient = (whole[at : at + n * m].view(n, m) for whole in (self._errors, self.flat))
            shaped = [place_in(whole, parameter, at) for whole in (self._errors, self.flat)]
            p = self._lefts[left : left + n * rank].view(rank, n)
            q = self._rights[right : right + m * rank].view(rank, m)
            q.copy_(torch.randn(m, rank, generator=torch.Generator().manual_seed(seed_of(name))).t())
            self._matrices[name] = Matrix(error, shaped[0], gradient, shaped[1], p, q)
            at, left, right = at + n * m, left + n * rank, right + m * rank
        self._in_order = list(self._matrices.values())
        self._handles: list[Any] = []
        self._left_behind = False
        self.payload_bytes = self._lefts.nbytes

    def begin(self) -> None:
        """Start a step: wait for all slots."""
        self.missing, self._left_behind = len(self.slots), False

    def copy_in(self, place: int, gradient: Tensor | None) -> Tensor:
        """Copy this rank's gradient of the slot at `place`, None for zero; return the tensor for the average."""
        self._in_order[place].add(gradient)
        self.missing -= 1
        return self._in_order[place].gradient_shaped

    def start(self, send: Send) -> None:
        """Start the allreduce of all P."""
        self._handles = send(self._lefts.mul_(1 / self._size), f"{self.name}.left")

    def has_arrived(self, poll: Callable[[Any], bool]) -> bool:
        """Return True if the next call, first `advance` (needs all P), then `finish` (needs all Q), would not block."""
        return all(poll(handle) for handle in self._handles)

    def advance(self, send: Send, wait: Wait) -> int:
        """Wait for all P, and start the allreduce of all Q; return the bytes of all Q."""
        for handle in self._handles:
            wait(handle)
        self._handles = []
        if not bool(torch.isfinite(self._lefts.sum())):
            # Some rank's gradient has NaN or Inf, and so has the average on all ranks. The residuals must not keep it.
            self._errors.zero_()
            self._left_behind = True
            return 0
        for matrix in self._in_order:
            matrix.project()
        self._handles = send(self._rights.mul_(1 / self._size), f"{self.name}.right")
        return self._rights.nbytes

    def finish(self, send: Send, wait: Wait) -> int:
        """Wait until the averages are in the tensors that `copy_in` returned; nothing is resent."""
        for handle in self._handles:
            wait(handle)
        if self._left_behind:
            self.flat.fill_(torch.nan)
            return 0
        for matrix in self._in_order:
            matrix.decompress()
        return 0

    def witness(self) -> Tensor:
        """Return NaN or Inf if an entry of the average is NaN or Inf, else a finite number."""
        # P's columns are orthonormal: no entry of P Q^T is larger than the sum of a row of Q.
        return (self.flat[:1] if self._left_behind else self._rights).abs().sum()

    def probe(self) -> str:
        """Return a digest of this rank's results for fixed input, in all shapes of its matrices."""
        digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
        for matrix in self._in_order:
            left, right = (torch.rand(thin.shape, generator=generator) - 0.5 for thin in (matrix.left, matrix.right))
            basis = torch.linalg.qr(left.t()).Q
            for part in basis.split(matrix.rows):
                digest.update(put_product(part, right, torch.empty(len(part), right.shape[1])).numpy())
            digest.update(matrix.right.numpy())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of this rank's error and the common Q of each parameter."""
        return {
            name: {"error": matrix.error.clone(), "right": matrix.right.clone()}
            for name, matrix in self._matrices.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Load the entries of `state` whose parameters are here; a Q of another rank than R is dropped."""
        for name in self._matrices.keys() & state.keys():
            matrix = self._matrices[name]
            matrix.error.copy_(state[name]["error"])
            if matrix.right.shape == state[name]["right"].shape:
                matrix.right.copy_(state[name]["right"])


def check_arithmetic(buckets: Sequence[LowRankBucket], world: World, *, compression: str) -> None:
    """Raise UsageError on all ranks if one computes other bits than rank 0 from the same input. Collective."""
    digests = world.allgather_object([bucket.probe() for bucket in buckets], name="gradients.low-rank.probe")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise UsageError(
            f"--compression {compression}: rank {odd[0]} and rank 0 compute different bits from the same input, so "
            "replicas would diverge; use the same processor model and --threads on all ranks, or fp16"
        ).on_all_ranks()


def pool_into(pool: dict[str, dict[str, Tensor]], more: dict[str, dict[str, Tensor]], *, number: int) -> None:
    """Add the state of rank `number` to the mean of the ranks before it; Q is equal on all ranks."""
    for name, kept in more.items():
        mean = pool[name]["error"]
        mean.add_((kept["error"] - mean) / number)


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return (n, m): the first dimension, and the product of the others, in memory order."""
    return parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])


def fits(parameter: Tensor, *, rank: int) -> bool:
    """Return True if compression at least halves a parameter's gradient, and it is row-major in memory."""
    if parameter.dim() < 2 or parameter.dtype != torch.float32:
        return False
    n, m = matrix_shape(parameter)
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    return dense and rank <= min(n, m) and 2 * rank * (n + m) <= n * m


def seed_of(name: str) -> int:
    """Return a random seed that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def place_in(flat: Tensor, parameter: nn.Parameter, offset: int) -> Tensor:
    """Return the slice of `flat` at `offset` as the gradient of `parameter`.

    It has the parameter's strides, so a channels_last weight keeps its format. It shares the memory of `flat`, but is
    not a view for PyTorch: scripts may call `detach_()` on gradients, which PyTorch rejects for views.
    """
    place: Tensor = flat.new_empty(0).set_(flat.untyped_storage(), offset, parameter.size(), parameter.stride())
    return place
