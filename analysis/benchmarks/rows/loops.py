"""Our step against plain loops with Horovod's optimizer, one or one per block, and with DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from analysis.benchmarks.contest import ABSENT, FUSED, Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import OBSERVED, HeldBatch, HeldSteps, Setting, held_batches
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import PlainLoop, parts_of, resnet, sgd, split

CUT = 3
STEP, FROZEN_STEP = (f"training step of a ResNet-18, 32 px, {what}" for what in ("nothing frozen", f"cut {CUT}"))


def duel(name: str, reference: str, what: str, *, ours: str = "ours") -> Duel:
    """Return a comparison of equal steps."""
    return Duel(name=name, ours=ours, reference=reference, bound=1.02, what=what)


DUELS = {
    0: (
        duel(
            "step_vs_distributed_optimizer",
            "horovod",
            f"{STEP}, against a plain loop with hvd.DistributedOptimizer (default fusion; it takes no channels_last "
            "weights, so only its images are)",
        ),
        duel(
            "step_vs_ddp_gloo",
            "ddp",
            f"{STEP}, against DistributedDataParallel over gloo (gradients as bucket views, no buffer broadcasts, "
            "images channels_last)",
        ),
        duel(
            "observing_gradients",
            "ours",
            f"{STEP}, observing local gradients for the vote, against not observing",
            ours="observing",
        ),
        duel("step_vs_optimizer_per_block", "per block", f"{STEP}, against one hvd.DistributedOptimizer per block"),
    ),
    CUT: (
        duel(
            "frozen_step_vs_pruned_optimizer",
            "horovod",
            f"{FROZEN_STEP}, against one hvd.DistributedOptimizer over the suffix",
        ),
        duel(
            "frozen_step_vs_optimizer_per_block",
            "per block",
            f"{FROZEN_STEP}, against one hvd.DistributedOptimizer per block of the suffix",
        ),
    ),
}
"""Cut -> the comparisons of steps with so many frozen blocks."""


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace)
    for cut, every in DUELS.items():
        duels = [each for each in every if each.name in wanted]
        if duels:
            yield from hold(ranks, sides_of(ranks, setting, duels, cut=cut), duels, pace=pace)


def sides_of(ranks: Ranks, setting: Setting, duels: Sequence[Duel], *, cut: int) -> list[Side]:
    """Return the sides of some duels. Collective: every rank must call this."""
    needed = {name for each in duels for name in (each.ours, *each.references)}
    batches = held_batches(setting.job("batches", cut=cut))
    makers: dict[str, Callable[[], Side]] = {
        "ours": lambda: Side("ours", HeldSteps(setting.job("ours", cut=cut)).step),
        "observing": lambda: Side("observing", HeldSteps(setting.job("observing", freeze=OBSERVED)).step),
        "horovod": lambda: Side("horovod", horovod(batches, cut, per_block=False).step, FUSED),
        "per block": lambda: Side("per block", horovod(batches, cut, per_block=True).step, FUSED),
        "ddp": lambda: Side("ddp", data_parallel(ranks, batches, setting.scratch).step, ABSENT),
    }
    return [make() for name, make in makers.items() if name in needed]


def horovod(batches: list[HeldBatch], cut: int, *, per_block: bool) -> PlainLoop:
    """Return the loop of a Horovod user; the gradients of channels_last weights would be refused."""
    import horovod.torch as hvd

    model = resnet()
    prefix, suffix = split(model, cut)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = [
        hvd.DistributedOptimizer(sgd(module), named_parameters=[(names[p], p) for p in module.parameters()])
        for module in (parts_of(model)[cut:] if per_block else [suffix])
    ]

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            activations = prefix(x)
        logits: torch.Tensor = suffix(activations)
        return logits

    return PlainLoop(forward, optimizers, batches)


def data_parallel(ranks: Ranks, batches: list[HeldBatch], scratch: Path) -> PlainLoop:
    """Return the loop of a DistributedDataParallel user over gloo.

    Collective: every rank must call this, once in a process.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(str(scratch / "gloo"), ranks.size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size)
    model = resnet()
    model.train()
    wrapped = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    return PlainLoop(wrapped, [sgd(wrapped.module)], batches)
