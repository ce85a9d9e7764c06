r"""Which way of fine-tuning gives the most accuracy for the seconds that one has? All that a user could do instead.

    python -m analysis.peers [peers_more|peers64|peers_mobilenet] --preset reduced --data-dir DIR --weights FILE

1,000 and 5,000 samples at 32 pixels; peers_more: 20,000 samples; peers64: images twice as large, from weights trained
at that size; peers_mobilenet: a MobileNetV3, whose parameters and work are spread evenly over many small blocks.
There are no public weights of it at 32 pixels:

    mpirun -n 2 hvfreeze train --model mobilenet_v3_small --data imagefolder --data-dir HALF --image-size 32 \
        --epochs 20 --lr 0.1 --schedule cosine --batch-size 64 --weight-decay 5e-4 \
        --mean 0.5071,0.4865,0.4409 --std 0.2673,0.2564,0.2762 --run-dir backbone
    python -m analysis.peers peers_mobilenet --preset reduced --data-dir OTHER --weights backbone/model.pt

HALF has CIFAR-10's airplanes, birds, deer, frogs and ships, OTHER its automobiles, cats, dogs, horses and trucks, each
as train/CLASS and test/CLASS, which may be links.

Full fine-tuning, also with smoothed labels, the last stage alone, the same from a cache, the head alone from a cache,
blocks frozen by vote, by AutoFreeze's test or PipeTransformer's schedule (both
with rows stored) or Composer's, DistributedDataParallel over gloo, and a head fitted to the features of all blocks:
each for several budgets of epochs, each budget with the learning rate that was best for it on held-out training
samples. Accuracies repeat exactly; training time is what a run's steps cost on an idle machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from analysis.parts.peers import (
    COLUMNS,
    Cell,
    ahead,
    best_full,
    best_rates,
    by_samples,
    cell_of,
    drawings_of,
    in_words,
    shortest,
)
from analysis.sweeps.experiment import Experiment
from analysis.sweeps.kept import KeptRuns
from analysis.sweeps.pages import Words
from analysis.sweeps.presets import PlannedRun, Preset, Value
from analysis.sweeps.results import Results
from analysis.sweeps.sweep import main

LEARNING_RATES = (0.02, 0.05, 0.1)
HELD_OUT = 0.2
BUDGETS = {1_000: (2, 4, 8, 16), 5_000: (1, 2, 4, 8), 20_000: (1, 2, 4, 8)}
"""Training samples -> epochs."""
KNOWN = 5_000
"""Training samples whose learning rates are taken where no others were tried."""
BATCHES = {1_000: 32, 5_000: 64, 20_000: 64}
"""Training samples -> batch of a rank: fewer samples, more steps an epoch than the preset's batch would leave."""
SEEDS = {1_000: 5, 5_000: 5, 20_000: 3}
"""Training samples -> seeds of a way."""
HEADLINE = ("full", "auto", "auto-one-view")
HEADLINE_SEEDS = {1_000: 10, 5_000: 10, 20_000: 3}
"""Seeds of the methods on the front page, by number of samples."""
SMOKE_SAMPLES, SMOKE_EPOCHS = 64, 1
SMOKE_PEERS = ("full", "exact", "auto")
"""The others' code paths are seen to run by other experiments."""
MANY, MANY_SAMPLES = 99, 10**9
NORMALISED: dict[str, Value] = {"mean": "0.5071,0.4865,0.4409", "std": "0.2673,0.2564,0.2762"}
"""Normalisation of the weights' training, on CIFAR-100."""
CACHED: dict[str, Value] = {"augment": "views:2", "cache": "on"}
LAST_STAGE: dict[str, Value] = {"freeze": "static", "cut": 4}
EXACT: dict[str, Value] = {"head": "multi-level", "head_fit": "exact", "augment": "views:2"}
AUTO: dict[str, Value] = {"freeze": "auto", "evaluate_every": 1000}
HEAD_ALONE: dict[str, Value] = {"freeze": "static", "cut": 5}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way of fine-tuning."""

    flags: Mapping[str, Value] = field(default_factory=dict)
    program: str = "hvfreeze"
    rate_of: str = ""
    """The peer whose learning rates it takes; empty chooses its own."""
    last: int = MANY
    """It is given so many of the budgets, the longest ones."""
    once: bool = False
    """Whether it has no epochs to choose."""
    more: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Training samples -> budgets that it is given besides."""
    lr: float | None = None
    """The method's own learning rate; None chooses one."""
    most_samples: int = MANY_SAMPLES
    """It is not run on more."""
    longer: int = 1
    """Times as many epochs as the budget says, for those whose epochs cost next to nothing."""


LIKE_FULL = Peer(rate_of="full", last=1, most_samples=5_000)
PEERS = {
    "full": Peer(more={5_000: (16,), 20_000: (16,)}),
    "ddp": replace(LIKE_FULL, program="analysis.ddp"),
    "smoothed": replace(LIKE_FULL, flags={"label_smoothing": 0.1}),
    "last-stage": Peer(flags=LAST_STAGE),
    "last-stage-cached": Peer(flags={**LAST_STAGE, **CACHED}, rate_of="last-stage"),
    "head-cached": Peer(flags={**HEAD_ALONE, **CACHED}, last=1, longer=4),
    "voted": replace(LIKE_FULL, flags={"freeze": "gradient-norm"}, last=2),
    "autofreeze": replace(LIKE_FULL, flags={"freeze": "percentile", **CACHED}),
    "pipetransformer": replace(LIKE_FULL, flags={"freeze": "geometric", **CACHED}),
    "composer": replace(LIKE_FULL, flags={"freeze": "linear"}),
    "exact": Peer(flags=EXACT, rate_of="full", once=True),
    "auto": Peer(
        flags=AUTO,
        rate_of="full",
        lr=0.05,
        once=True,
        more={SMOKE_SAMPLES: (4,), 5_000: (4,), 20_000: (4,)},
    ),
    "auto-one-view": Peer(flags={**AUTO, "mirror": "off"}, rate_of="full", lr=0.05, once=True),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task for the comparison of methods."""

    larger: int = 1
    """Times the preset's image size."""
    flags: Mapping[str, Value] = field(default_factory=dict)
    """Flags of all runs, such as another model."""
    counts: Sequence[int] = (1_000, 5_000)
    """Numbers of training samples; 20,000 take hours more."""
    peers: Sequence[str] = tuple(PEERS)
    rates_of: str = ""
    """The experiment whose learning rates are taken, but for full fine-tuning's longest budget on no more than KNOWN
    samples, which all are held against. Empty tries all for everyone."""
    like: Mapping[int, int] = field(default_factory=dict)
    """Epochs -> those whose learning rates they take, where they would take another experiment's."""

    def chooses(self, cell: Cell, peer: Peer) -> bool:
        """Return whether learning rates are tried for a cell."""
        longest = cell.epochs == max(BUDGETS.get(cell.samples, (cell.epochs,)))
        held_against = cell.peer == "full" and longest and cell.samples <= KNOWN
        return held_against if self.rates_of else not peer.rate_of

    def work(self, preset: Preset, cell: Cell, peer: Peer) -> dict[str, Value]:
        """Return a cell's flags but for the learning rate; what counts is the accuracy after the last epoch."""
        epochs = cell.epochs * peer.longer
        return {
            "image_size": self.larger * preset.image_size,
            "train_samples": cell.samples,
            "batch_size": preset.batch_size if preset.is_smoke else BATCHES[cell.samples],
            "epochs": epochs,
            "evaluate_every": epochs,
            "checkpoint_every": "0",
            "weight_decay": 5e-4,
            **({} if preset.is_smoke else {**NORMALISED, **self.flags}),
            **peer.flags,
        }

    def rates(self, results: Results) -> dict[Cell, float]:
        """Return the learning rate of every cell that one is known for."""
        kept = best_rates(KeptRuns(results.directory.parent / self.rates_of).rows()) if self.rates_of else {}
        known = {cell: lr for cell, lr in kept.items() if cell.samples == KNOWN}
        nearest = {replace(cell, samples=count): lr for cell, lr in known.items() for count in self.counts}
        nearest |= {c: nearest[replace(c, epochs=self.like[c.epochs])] for c in nearest if c.epochs in self.like}
        return {**nearest, **kept, **best_rates(results.rows, {**nearest, **kept})}


def cells(preset: Preset, task: Task) -> Iterator[tuple[Cell, Peer]]:
    """Yield every peer at every number of samples and budget of epochs."""
    held = {samples: epochs for samples, epochs in BUDGETS.items() if samples in task.counts}
    budgets = {SMOKE_SAMPLES: (SMOKE_EPOCHS,)} if preset.is_smoke else held
    for samples, epochs in budgets.items():
        for name, peer in PEERS.items():
            if samples > peer.most_samples or name not in (SMOKE_PEERS if preset.is_smoke else task.peers):
                continue
            for budget in budgets_of(peer, samples, epochs):
                yield Cell(samples=samples, peer=name, epochs=budget), peer


def budgets_of(peer: Peer, samples: int, epochs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the epochs that a peer is given where others are given `epochs`."""
    return (*((1,) if peer.once else epochs[-peer.last :]), *peer.more.get(samples, ()))


def runs(preset: Preset, task: Task) -> list[PlannedRun]:
    """Return the runs that choose learning rates, each for a peer, a number of samples and a budget."""
    planned = []
    for cell, peer in cells(preset, task):
        for lr in preset.few(LEARNING_RATES) if task.chooses(cell, peer) else []:
            flags = {**task.work(preset, cell, peer), "validation_fraction": HELD_OUT, "lr": lr}
            planned.append(preset.run(f"lr{lr:g}-{cell.label}", preset.lr_seeds[0], flags, program=peer.program))
    return planned


def then(preset: Preset, results: Results, task: Task) -> list[PlannedRun]:
    """Return the runs that are tested, each at its cell's learning rate; a seed's runs follow each other in time."""
    rates, planned, chosen = task.rates(results), [], list(cells(preset, task))
    for seed in preset.seeds if preset.is_smoke else range(max(HEADLINE_SEEDS.values())):
        for cell, peer in chosen:
            if preset.is_smoke or seed < seeds_of(cell):
                known = rates.get(replace(cell, peer=peer.rate_of or cell.peer), LEARNING_RATES[0])
                flags = {**task.work(preset, cell, peer), "lr": known if peer.lr is None else peer.lr}
                planned.append(preset.run(cell.label, seed, flags, program=peer.program))
    return planned


def seeds_of(cell: Cell) -> int:
    """Return how many seeds a cell is made with; a head's one epoch is what the front page shows of auto."""
    shown = cell.peer in HEADLINE and (cell.peer == "full" or cell.epochs == 1)
    return (HEADLINE_SEEDS if shown else SEEDS)[cell.samples]


def words(results: Results) -> Words:
    return {
        "by_samples": by_samples(results),
        "columns": COLUMNS,
        "tested_seeds": results.seeds([label for _, own in by_samples(results) for label in own.labels]),
        "shown_labels": lambda own: {label: own.shown_as(label) for label in own.labels},
        **{each.__name__: each for each in (cell_of, in_words, best_full, shortest, ahead)},
    }


def experiment_on(name: str, task: Task) -> Experiment:
    """Return the experiment `name`."""
    return Experiment(
        name=name,
        module="" if name == "peers" else "peers",
        runs=lambda preset: runs(preset, task),
        then=lambda preset, results: then(preset, results, task),
        chooses_lr=True,
        own_seeds=True,
        words=words,
        drawings=drawings_of,
    )


STRONGEST = ("full", "last-stage-cached", "exact", "auto", "auto-one-view")
"""Ours, what they are held against, and at 32 pixels the strongest of the others that store rows."""
TASKS = {
    "peers": Task(),
    "peers_more": Task(counts=(20_000,), peers=STRONGEST, rates_of="peers", like={16: 8}),
    "peers64": Task(
        larger=2,
        peers=(*STRONGEST, "head-cached", "voted", "autofreeze", "pipetransformer", "composer"),
        rates_of="peers",
    ),
    "peers_mobilenet": Task(
        flags={"model": "mobilenet_v3_small", "data": "imagefolder", "data_dir": "OTHER", "reset_head": True},
        counts=(5_000,),
        peers=("full", "auto", "auto-one-view"),
    ),
}
EXPERIMENTS = {name: experiment_on(name, task) for name, task in TASKS.items()}

if __name__ == "__main__":
    named, given = (sys.argv[1], sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in TASKS else ("peers", sys.argv[1:])
    sys.exit(main(EXPERIMENTS[named], given))
