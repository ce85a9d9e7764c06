"""Gradient buckets, each of which is allreduced as soon as it is full, in the same order on all ranks.

A bucket holds consecutive parameters whose gradients are sent together: as float32, float64 or float16 in one flat
buffer (`FlatBucket`), or as low-rank matrices (`LowRankBucket`). The buckets depend only on the parameters and the
compression. Of an embedding's sparse gradient, only the rows that a rank's batch has used are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.low_rank import LowRankBucket, Send, Wait, fits, place_in
from hvfreeze.comm.world import World
from hvfreeze.config.optimizer import parse_compression
from hvfreeze.errors import UsageError

Named = Sequence[tuple[str, nn.Parameter]]
TYPES = (torch.float32, torch.float64)
"""Types that Horovod sums exactly enough; it cannot sum bfloat16, and float16 sums lose precision."""

TOP = 15
"""Exponent limit: the sum over ranks stays below 2^15 if every rank's largest value, divided by their number, does."""
HEADROOM = 4
BOTTOM = TOP - HEADROOM - 12
"""Below this exponent, values a thousand times smaller than the largest keep few bits or none."""
LARGEST_SCALE = 64
"""Loss scale exponent. Keeps gradients up to 1e19 within float32; below 1e-20 they are resent unscaled."""
NOT_FINITE, ALL_ZERO = 2000.0, -2000.0


class Fp16Compressor:
    """The float16 copy of a bucket of `numel` elements, followed by every rank's largest exponent.

    `exponents` holds an upper bound of each parameter's gradient in the last step, as a power of two. The owner keeps
    it, because a bucket exists only until the cut changes.
    """

    def __init__(self, numel: int, names: Sequence[str], *, rank: int, size: int, exponents: dict[str, int]) -> None:
        self._wire = torch.zeros(numel + size, dtype=torch.float16)
        self.values, self._tops = self._wire[:numel], self._wire[numel:]
        self._names, self._rank, self._size, self._exponents = names, rank, size, exponents
        self._shift, self.fitted = 0, False
        self.tail_bytes = self._tops.nbytes

    def next_scale(self) -> float:
        """Choose the scale of the step, a power of two, from the last exponents; equal on all ranks."""
        known = [self._exponents[name] for name in self._names if name in self._exponents]
        # The gradient of a new parameter may have any size: assume at least exponent 0.
        expected = max(known) if len(known) == len(self._names) else max([*known, 0])
        self._shift = max(-LARGEST_SCALE, min(LARGEST_SCALE, TOP - HEADROOM - expected))
        return 2.0**self._shift

    def filled_from(self, flat: Tensor) -> Tensor:
        """Return the float16 message for the scaled values in `flat`, already divided by the number of ranks."""
        self.values.copy_(flat)
        self._tops.zero_()
        largest = 0.0
        if len(flat):
            low, high = torch.aminmax(flat)
            largest = max(-float(low), float(high)) * self._size
        exponent = math.frexp(largest)[1] if largest else ALL_ZERO
        self._tops[self._rank] = exponent if math.isfinite(largest) else NOT_FINITE
        return self._wire

    def misfitted(self) -> bool:
        """Return True if the scale did not fit the values, once the sum has arrived; update the exponents."""
        top = float(self._tops.max())
        if ALL_ZERO < top < NOT_FINITE:
            self._exponents.update(dict.fromkeys(self._names, int(top) - self._shift))
        self.fitted = top <= TOP and not ALL_ZERO < top < BOTTOM
        return not self.fitted

    def unscale(self, flat: Tensor) -> None:
        """Divide the sum by the scale; exact."""
        if self._shift:
            flat.mul_(2.0**-self._shift)


@dataclass
class FlatBucket:
    """Consecutive parameters of one type, last first, in one flat buffer."""

    name: str
    slots: list[int]
    flat: Tensor
    views: list[Tensor]
    """Views of `flat` for each slot, with the parameter's shape and strides."""
    half: Fp16Compressor | None
    before: float
    """Factor applied to gradients before they are summed."""
    scale: float = 1.0
    """Factor applied to a gradient when it is copied into `flat`: `before`, times the float16 scale."""
    missing: int = 0
    handles: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Start a step: wait for all slots."""
        self.missing, self.handles = len(self.slots), []
        # Scale during the copy, which costs nothing, so that sums of large float16 values cannot overflow.
        self.scale = self.before if self.half is None else self.half.next_scale() * self.before

    def copy_in(self, place: int, gradient: Tensor | None) -> Tensor:
        """Copy this rank's gradient of the slot at `place`, None for zero; return the tensor for the average."""
        if gradient is None:
            self.views[place].zero_()
        else:
            torch.mul(gradient, self.scale, out=self.views[place])
        self.missing -= 1
        return self.views[place]

    @property
    def payload_bytes(self) -> int:
        """Gradient bytes that a rank sends in a step."""
        return self.flat.nbytes if self.half is None else self.half.values.nbytes

    @property
    def tail_bytes(self) -> int:
        """Bytes that a rank sends in addition to the gradients."""
        return 0 if self.half is None else self.half.tail_bytes

    def start(self, send: Send) -> None:
        """Start the allreduce; all slots must be filled."""
        self.handles = send(self.flat if self.half is None else self.half.filled_from(self.flat), self.name)

    def has_arrived(self, poll: Callable[[Any], bool]) -> bool:
        """Return True: `advance` never blocks."""
        return True

    def advance(self, send: Send, wait: Wait) -> int:
        """Start the second allreduce; a flat bucket has none, so return 0 bytes."""
        return 0

    def finish(self, send: Send, wait: Wait) -> int:
        """Wait until `flat` holds the sum over ranks; return the bytes that had to be resent."""
        for handle in self.handles:
            wait(handle)
        if self.half is None:
            return 0
        again = self.half.misfitted()
        if again:
            for handle in send(self.flat, f"{self.name}.again"):
                wait(handle)
        else:
            self.flat.copy_(self.half.values)
        self.half.unscale(self.flat)
        return self.flat.nbytes if again else 0

    def witness(self) -> Tensor:
        """Return NaN or Inf if an entry of the average is NaN or Inf, else a finite number."""
        # A sum costs one pass. float16 values that fitted need none: every rank's largest exponent is known.
        return torch.zeros(()) if self.half is not None and self.half.fitted else self.flat.sum()


Bucket = FlatBucket | LowRankBucket


@dataclass(frozen=True)
class Scaling:
    """Factors for gradients before they are summed over ranks, and for their sum."""

    before: float
    after: float = 1.0

    @classmethod
    def mean(cls, size: int) -> Scaling:
        """Return the factors of an average over `size` ranks; divides first, so that float16 sums cannot overflow."""
        return cls(1 / size)

    def compressed(self, size: int) -> Scaling:
        """Return factors with the same result whose sum is the average, as float16 and error feedback need."""
        return self if self == Scaling.mean(size) else Scaling(1 / size, self.before * self.after * size)


def lay_out(
    named: Named,
    slots: Sequence[int],
    *,
    compression: str,
    rank: int,
    size: int,
    bucket_bytes: int,
    exponents: dict[str, int],
    title: str = "",
    before: float | None = None,
) -> list[Bucket]:
    """Return the buckets, low-rank ones first; every parameter is in one bucket.

    Args:
        named: parameters.
        slots: their indices among all carried parameters.
        compression: none, fp16 or powersgd:R.
        rank: this rank among `size`.
        size: number of ranks in the allreduce.
        bucket_bytes: target size of a bucket.
        exponents: see `Fp16Compressor`.
        title: prefix of the buckets' names.
        before: factor of gradients before they are summed; None divides by `size`. Low rank always divides.
    """
    kind, columns = parse_compression(compression)
    thin = [slot for slot, (_, one) in enumerate(named) if kind == "powersgd" and fits(one, rank=columns)]
    whole = sorted(set(range(len(named))) - set(thin))
    half = partial(Fp16Compressor, rank=rank, size=size, exponents=exponents) if kind == "fp16" else None
    buckets: list[Bucket] = [
        LowRankBucket(
            f"{title}gradients.low-rank.{number}",
            [named[place] for place in group],
            [slots[place] for place in group],
            size=size,
            rank=columns,
        )
        for number, group in enumerate(groups_of(named, thin, group_bytes=bucket_bytes))
    ]
    for number, run in enumerate(runs_of(named, whole, bucket_bytes=bucket_bytes)):
        parameters = [named[place][1] for place in run]
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        views, offset = [], 0
        for parameter in parameters:
            views.append(place_in(flat, parameter, offset))
            offset += parameter.numel()
        copy = half(flat.numel(), [named[place][0] for place in run]) if half else None
        own = [slots[place] for place in run]
        buckets.append(
            FlatBucket(f"{title}gradients.{number}", own, flat, views, copy, 1 / size if before is None else before)
        )
    return buckets


def groups_of(named: Named, slots: Sequence[int], *, group_bytes: int) -> list[list[int]]:
    """Return groups of `slots` with at least `group_bytes` of gradients, last first; the final group may be smaller."""
    groups: list[list[int]] = [[]]
    for slot in reversed(slots):
        if sum(named[one][1].nbytes for one in groups[-1]) >= group_bytes:
            groups.append([])
        groups[-1].append(slot)
    return [group for group in groups if group]


def runs_of(named: Named, slots: Sequence[int], *, bucket_bytes: int) -> list[list[int]]:
    """Return runs of `slots` of one type and about `bucket_bytes`, last first; a larger parameter is alone."""
    runs: list[list[int]] = []
    filled, kind = bucket_bytes, None
    for slot in reversed(slots):
        parameter = named[slot][1]
        if filled + parameter.nbytes > bucket_bytes or parameter.dtype != kind:
            runs.append([])
            filled, kind = 0, parameter.dtype
        runs[-1].append(slot)
        filled += parameter.nbytes
    return runs


def check_types(named: Named) -> None:
    """Raise UsageError if the gradient of a parameter cannot be exchanged because of its type."""
    for name, parameter in named:
        if parameter.dtype not in TYPES:
            raise UsageError(
                f"parameter {name} has dtype {str(parameter.dtype).removeprefix('torch.')}, but only float32 and "
                "float64 gradients can be averaged over ranks; keep the parameters in float32 and compute under "
                "autocast"
            )


class GradientExchange:
    """The buckets of a step in the order in which they are sent.

    Args:
        world: the ranks that sum.
        buckets: low-rank ones first, because their second allreduce waits for the first.
        piece_bytes: largest message; a larger bucket is sent in pieces.
        after: factor of the sums.
    """

    def __init__(self, world: World, buckets: Sequence[Bucket] = (), *, piece_bytes: int, after: float = 1.0) -> None:
        self._world, self.buckets, self._piece_bytes, self._after = world, buckets, piece_bytes, after
        self.low_rank = [bucket for bucket in buckets if isinstance(bucket, LowRankBucket)]
        self._places = {slot: (bucket, i) for bucket in self.buckets for i, slot in enumerate(bucket.slots)}
        self._started = self._advanced = 0
        # The gradient's version by place: it must not change until it is summed.
        self._versions: dict[int, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """Start a step: wait for all gradients."""
        for bucket in self.buckets:
            bucket.begin()
        self._started = self._advanced = 0
        self._versions = {}

    def copy_in(self, slot: int, gradient: Tensor | None) -> Tensor:
        """Copy this rank's gradient of a slot, None for zero; return the tensor that will hold the average."""
        bucket, i = self._places[slot]
        place = bucket.copy_in(i, gradient)
        self._versions[slot] = (place, place._version)
        return place

    def is_touched(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> bool:
        """Return True if gradients were changed after they were copied.

        Args:
            bucket: the bucket of the gradients.
            gradients: the current gradients of its parameters, in the order of its slots.
        """
        for slot, gradient in zip(bucket.slots, gradients, strict=True):
            place, version = self._versions[slot]
            if gradient is None or place._version != version or place.data_ptr() != gradient.data_ptr():
                return True
        return False

    def start_full(self) -> tuple[int, int]:
        """Start full buckets and advance arrived ones; return the bytes of gradients and the additional bytes."""
        payload = tail = 0
        while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
            bucket = self.buckets[self._started]
            bucket.start(self._send)
            payload += bucket.payload_bytes
            tail += bucket.tail_bytes
            self._started += 1
        while self._advanced < self._started and self.buckets[self._advanced].has_arrived(self._world.poll):
            payload += self._advance()
        return payload, tail

    def finish(self, check: Callable[[Bucket], None]) -> int:
        """Wait for all sums; return the remaining bytes sent. Calls `check` on each bucket before its sum is used."""
        payload, finished, poll = 0, 0, self._world.poll
        while self._advanced < len(self.buckets):
            # Finish low-rank buckets whose sums have arrived while waiting for the first sums of later buckets.
            behind = self.low_rank[finished : self._advanced]
            if behind and not self.buckets[self._advanced].has_arrived(poll) and behind[0].has_arrived(poll):
                payload += self._finish(behind[0], check)
                finished += 1
            else:
                payload += self._advance()
        return payload + sum(self._finish(bucket, check) for bucket in self.buckets[finished:])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state that low rank keeps between steps, by parameter."""
        return {name: kept for bucket in self.low_rank for name, kept in bucket.state_dict().items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Load the entries of the state whose parameters are carried."""
        for bucket in self.low_rank:
            bucket.load_state_dict(state)

    def _finish(self, bucket: Bucket, check: Callable[[Bucket], None]) -> int:
        check(bucket)
        payload = bucket.finish(self._send, self._world.wait)
        if self._after != 1.0:
            bucket.flat.mul_(self._after)
        return payload

    def _advance(self) -> int:
        self._advanced += 1
        return self.buckets[self._advanced - 1].advance(self._send, self._world.wait)

    def _send(self, wire: Tensor, name: str) -> list[Any]:
        pieces = wire.split(self._piece_bytes // wire.element_size())
        return [self._world.start_allreduce_(piece, name=f"{name}.{place}") for place, piece in enumerate(pieces)]


DENSE = -1
"""Marks a dense gradient, in place of row numbers."""


def sparse_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters whose gradients are sparse according to the model's own layers."""
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    return frozenset(parameter for layer in layers if layer.sparse for parameter in layer.parameters())


def exchange_sparse(parameter: nn.Parameter, world: World, scaling: Scaling, *, name: str) -> int:
    """Set the gradient of an embedding, (rows, ...), to the scaled sum over ranks; return the bytes sent.

    The result is sparse, with possibly repeated rows, unless the gradient is dense on some rank, e.g. because another
    layer uses the parameter. A rank without a gradient adds nothing. Collective.
    """
    gradient = parameter.grad
    dense = gradient is not None and not gradient.is_sparse
    if gradient is None or dense:
        rows = torch.full((1,) if dense else (0,), DENSE, dtype=torch.int64)
        values = torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype)
    else:
        # Not coalesced: the optimizer adds up a row's entries of all ranks in one order. With one sparse dimension, a
        # row of the gradient is a row of the parameter.
        whole = gradient if gradient.sparse_dim() == 1 else gradient.to_dense().to_sparse(1)
        rows, values = whole._indices()[0], whole._values() * scaling.before
    gathered = world.allgather_rows(rows, name=f"{name}.rows")
    if bool((gathered == DENSE).any()):
        local = torch.zeros_like(parameter) if gradient is None else gradient.to_dense() * scaling.before
        parameter.grad = world.allreduce_sum(local, name=f"{name}.dense").mul_(scaling.after)
        return rows.nbytes + local.nbytes
    summed: Tensor = world.allgather_rows(values, name=f"{name}.values") * scaling.after
    parameter.grad = torch.sparse_coo_tensor(gathered[None], summed, parameter.shape, check_invariants=False)
    return rows.nbytes + values.nbytes
