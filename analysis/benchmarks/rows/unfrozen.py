"""Nothing frozen: our step against plain loops with Horovod's optimizer and with DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from analysis.benchmarks.contest import ABSENT, FUSED, Duel, Pace, Side, hold
from analysis.benchmarks.judging import Row
from analysis.benchmarks.material import OBSERVED, HeldBatch, HeldSteps, Setting, held_batches
from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.references import PlainLoop, parts_of, resnet, sgd, split

STEP = "training step of a ResNet-18, 32 px, nothing frozen"

DUELS = (
    Duel(
        name="step_vs_distributed_optimizer",
        ours="ours",
        reference="horovod",
        bound=1.02,
        what=f"{STEP}, against a plain loop with hvd.DistributedOptimizer (default fusion; it takes no channels_last "
        "weights, so only its images are)",
    ),
    Duel(
        name="step_vs_ddp_gloo",
        ours="ours",
        reference="ddp",
        bound=1.02,
        what=f"{STEP}, against DistributedDataParallel over gloo (gradients as bucket views, no buffer broadcasts, "
        "images channels_last)",
    ),
    Duel(
        name="observing_gradients",
        ours="observing",
        reference="ours",
        bound=1.02,
        what=f"{STEP}, observing local gradients for the vote, against not observing",
    ),
    Duel(
        name="step_vs_optimizer_per_block",
        ours="ours",
        reference="per block",
        bound=1.02,
        what=f"{STEP}, against one hvd.DistributedOptimizer per block",
    ),
)


def measure(ranks: Ranks, wanted: Collection[str], pace: Pace, scratch: Path) -> Iterator[Row]:
    """Yield the rows of this case. Collective: every rank must call this."""
    setting = Setting.of(ranks, scratch, pace)
    duels = [duel for duel in DUELS if duel.name in wanted]
    needed = {name for duel in duels for name in (duel.ours, *duel.references)}
    batches = held_batches(setting.job("batches"))
    makers: dict[str, Callable[[], Side]] = {
        "ours": lambda: Side("ours", HeldSteps(setting.job("ours")).step),
        "observing": lambda: Side("observing", HeldSteps(setting.job("observing", freeze=OBSERVED)).step),
        "horovod": lambda: Side("horovod", horovod(batches, per_block=False).step, FUSED),
        "per block": lambda: Side("per block", horovod(batches, per_block=True).step, FUSED),
        "ddp": lambda: Side("ddp", data_parallel(ranks, batches, scratch).step, ABSENT),
    }
    yield from hold(ranks, [make() for name, make in makers.items() if name in needed], duels, pace=pace)


def horovod(batches: list[HeldBatch], *, per_block: bool, cut: int = 0) -> PlainLoop:
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
