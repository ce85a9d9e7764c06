"""What the replicas of a run had each of their own, made one, for a job of another size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.exchange.low_rank.parcel import pool_into


def pooled(owns: Iterable[dict[str, Any]], *, restep: Callable[[int], int]) -> dict[str, Any]:
    """Return the state with which every rank of another number of ranks goes on; see `Strategy.redealt`.

    Running statistics are those of all ranks' batches together. Errors that compression keeps are averaged, so that
    they add to the average over ranks what they would have added. Only one of `owns` is in memory beside the result.
    """
    result: dict[str, Any] = {}
    for number, own in enumerate(owns):
        statistics = [tensor.double() for tensor in own["statistics"]]
        if not result:
            result = {**own, "statistics": statistics, "freezer": Freezer.redealt(own["freezer"], restep=restep)}
            spreads = [torch.zeros_like(tensor) for tensor in statistics[::2]]
        else:
            add_statistics(result["statistics"], spreads, statistics, number=number + 1)
            pool_into(result["reducer"]["low_rank"], own["reducer"]["low_rank"], number=number + 1)
    for variance, spread in zip(result["statistics"][1::2], spreads, strict=True):
        variance.add_(spread / (number + 1))
    return result


def add_statistics(pool: list[Tensor], spreads: list[Tensor], more: list[Tensor], *, number: int) -> None:
    """Add the `number`-th rank's running statistics, mean and variance in turn, to the means over ranks in `pool`.

    `spreads` are sums of squared distances of the means from their mean. Equal statistics are left as they are, bit for
    bit. Source: Welford, Note on a method for calculating corrected sums of squares and products (Technometrics 1962).
    """
    for place, spread in enumerate(spreads):
        (mean, variance), (theirs, other) = pool[2 * place : 2 * place + 2], more[2 * place : 2 * place + 2]
        distance = theirs - mean
        mean.add_(distance / number)
        spread.add_(distance * (theirs - mean))
        variance.add_((other - variance) / number)
