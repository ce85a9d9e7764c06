"""In which order the buckets of a step go on when the backward pass has ended."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvfreeze.comm.gradient_exchange import Fp16Compressor, GradientExchange
from hvfreeze.comm.low_rank import LowRankBucket
from hvfreeze.comm.world import SoloWorld


class Slow(SoloWorld):
    """Two ranks whose messages arrive when somebody waits for them, the ones in `there` at once."""

    size = 2

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.waited: list[str] = []

    def start_allreduce_(self, tensor: Tensor, *, name: str) -> str:  # type: ignore[override]
        return name

    def poll(self, handle: str) -> bool:  # type: ignore[override]
        return handle in self.there

    def wait(self, handle: str) -> None:  # type: ignore[override]
        self.waited.append(handle)


def test_waiting_for_the_last_first_sum_is_filled_with_what_has_arrived() -> None:
    world = Slow()
    groups = [
        LowRankBucket(f"g{slot}", [(f"p{slot}", nn.Parameter(torch.zeros(8, 8)))], [slot], size=2, rank=1)
        for slot in range(3)
    ]
    exchange = GradientExchange(world, groups, piece_bytes=1000)
    exchange.begin()
    for slot in range(3):
        exchange.copy_in(slot, torch.ones(8, 8))
        # The first group's sums are both there before the backward pass ends, of the second only P's.
        world.there |= {"g0.left.0", "g0.right.0", "g1.left.0"}
        exchange.start_full()
    assert world.waited == ["g0.left.0", "g1.left.0"]
    checked: list[str] = []
    exchange.finish(lambda bucket: checked.append(f"{bucket.name}, waited for {world.waited[-1]}"))
    assert world.waited[2:] == ["g0.right.0", "g2.left.0", "g1.right.0", "g2.right.0"]
    assert checked == [
        "g0, waited for g1.left.0",
        "g1, waited for g2.left.0",
        "g2, waited for g1.right.0",
    ], "each once, the first while the last's P was on its way"


def test_a_bucket_without_elements_fits_float16() -> None:
    half = Fp16Compressor(0, ["empty"], rank=0, size=1, exponents={})
    assert half.next_scale() > 0.0
    assert len(half.filled_from(torch.empty(0))) == 1 and not half.misfitted()
