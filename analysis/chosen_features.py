"""Need a solved head all features, and do those of before tuning help it beside those of after?

    python -m analysis.chosen_features --data-dir DIR --weights FILE [--seeds 0,1,2] [--out DIR]

Every block's features of 5 000 images and their mirror images, drawn as `hvfreeze train --freeze auto` draws them, in
one process: all of them, those that a group lasso uses most, as many at random; those of a network whose blocks from 2
on were tuned for four epochs, alone and beside those of before. A penalty is chosen on held-out samples where the
network has not learnt from them; for tuned features that of the frozen ones is taken. Rows that are there stay.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from analysis.parts.selection import readme, used
from analysis.peers import NORMALISED
from analysis.sweeps.kept import RESULTS, publish, texts_of
from analysis.sweeps.launching import Site, launch
from analysis.sweeps.presets import REDUCED, Value
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.data.batches import Batch, open_feeds, padded_batches
from hvfreeze.data.decoding import Inputs
from hvfreeze.data.views import seen_shape
from hvfreeze.errors import HvfreezeError
from hvfreeze.heads.features import every_block
from hvfreeze.heads.kernel import PENALTIES as COMPARED
from hvfreeze.heads.kernel import KernelFit, KernelHead, fit_kernel
from hvfreeze.heads.linear import PENALTIES as LINEAR
from hvfreeze.heads.linear import HeadFit, fit_softmax
from hvfreeze.heads.moments import measure
from hvfreeze.heads.multilevel import SolvableHead, take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.report.tables import to_csv
from hvfreeze.training.build import open_corpus
from hvfreeze.training.stage_build import Blueprint

SAMPLES, POOL, HELD_OUT, CLASSES = 5_000, 4, 0.1, 10
MEMORY = 2**32
SHARES = (0.5, 0.25, 0.1)
TUNED: dict[str, Value] = {"freeze": "static", "cut": 2, "epochs": 4, "evaluate_every": 4, "lr": 0.05}
COMMON: dict[str, Value] = {"train_samples": SAMPLES, "batch_size": 64, "checkpoint_every": "0", "weight_decay": 5e-4}
HEADS = ("compared", "linear")


@dataclass(frozen=True)
class Views:
    """All views of the training samples and the test images, as features.

    Attributes: rows (N, D) float32, labels (N,), held_out (N,) bool, test (T, D), truth (T,).
    """

    rows: Tensor
    labels: Tensor
    held_out: Tensor
    test: Tensor
    truth: Tensor

    def only(self, columns: Tensor) -> Views:
        """Return some of the features."""
        return Views(self.rows[:, columns], self.labels, self.held_out, self.test[:, columns], self.truth)

    def beside(self, other: Views) -> Views:
        """Return these features and other ones of the same images."""
        rows, test = (torch.cat(pair, 1) for pair in ((self.rows, other.rows), (self.test, other.test)))
        return Views(rows, self.labels, self.held_out, test, self.truth)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write it up seed by seed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.chosen_features", description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="CIFAR-10")
    parser.add_argument("--weights", type=Path, required=True, help="of a ResNet-18 trained at 32 pixels")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=RESULTS / "chosen_features", help="folder for rows.csv, README.md")
    options = parser.parse_args(arguments)
    rows = texts_of(options.out / "rows.csv")
    try:
        for seed in map(int, options.seeds.split(",")):
            if not any(row["seed"] == str(seed) for row in rows):
                for row in rows_of(seed, options.data_dir, options.weights):
                    rows.append({name: str(value) for name, value in row.items()})
                    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                publish(options.out / "rows.csv", to_csv(rows))
                publish(options.out / "README.md", readme(rows))
    except HvfreezeError as error:
        print(f"chosen_features: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def rows_of(seed: int, data_dir: Path, weights: Path) -> Iterator[dict[str, Any]]:
    """Yield the test accuracy of both heads on each choice of features."""
    frozen = features(seed, data_dir, weights)
    penalties: dict[str, float] = {}

    def rows(name: str, views: Views) -> Iterator[dict[str, Any]]:
        for head in HEADS:
            accuracy, penalty = solved(views, head, penalty=penalties[head] if "tuned" in name else None)
            penalties.setdefault(head, penalty)
            row = {"seed": seed, "features": name, "head": head, "width": views.rows.shape[1]}
            yield {**row, "accuracy": accuracy, "penalty": penalty}

    for name, views in chosen(frozen, seed):
        yield from rows(name, views)
    with tempfile.TemporaryDirectory() as folder:
        planned = REDUCED.run("tuned", seed, {**COMMON, **NORMALISED, **TUNED, "weights": weights.name})
        run_dir = launch(planned, Site(work=Path(folder), data_dir=data_dir, weights=weights), timeout=1200)
        tuned = features(seed, data_dir, run_dir / "model.pt")
    yield from rows("tuned", tuned)
    yield from rows("tuned and frozen", frozen.beside(tuned))


def chosen(frozen: Views, seed: int) -> Iterator[tuple[str, Views]]:
    """Yield all features, those that a group lasso uses most, and as many at random."""
    yield "all", frozen
    known = measure(RowsInMemory(frozen.rows, frozen.labels, frozen.held_out), world=SoloWorld())
    standard = ((frozen.rows - known.mean.float()) * known.scale.float())[~frozen.held_out]
    order = used(standard, frozen.labels[~frozen.held_out], classes=CLASSES).argsort(descending=True, stable=True)
    generator = torch.Generator().manual_seed(seed)
    for share in SHARES:
        count = round(share * len(order))
        yield f"{share:.0%} by group lasso", frozen.only(order[:count].sort().values)
        yield f"{share:.0%} at random", frozen.only(torch.randperm(len(order), generator=generator)[:count])


def features(seed: int, data_dir: Path, weights: Path) -> Views:
    """Return what the network of these weights makes of the images that a run of this seed has."""
    flags: Mapping[str, Value] = {**REDUCED.common(), **COMMON, **NORMALISED, "weights": str(weights)}
    config = from_dict({**flags, "seed": seed, "data_dir": str(data_dir)}, source="chosen_features").resolved()
    world, batch = SoloWorld(), config.optimizer.batch_size
    corpus = open_corpus(config.data, world, seed=config.data_seed, batch_size=batch, replicas=1, whole_batches=False)
    feed, evaluated = open_feeds(
        corpus, config.data, seed=config.data_seed, replica=0, replicas=1, budget_bytes=MEMORY, solved=True
    )
    chain, _ = Blueprint.of(config.model, corpus, image_size=config.data.image_size).build_from(seed)
    chain.model.eval()
    side = config.data.image_size
    read = every_block(chain, pool=POOL, example=torch.zeros(1, *seen_shape(corpus.train.image_shape, side)))
    shown, tested = feed.every_view(), padded_batches(corpus.evaluated_ids, evaluated.labels_of, batch)
    held_out = torch.from_numpy(feed.held_out(HELD_OUT))
    known = torch.cat([held_out[torch.from_numpy(each.ids[: each.counted])] for each in shown])
    rows, labels = table(read, feed.images, shown)
    return Views(rows, labels, known, *table(read, evaluated, tested))


@torch.no_grad()
def table(read: Callable[[Tensor], Tensor], images: Inputs, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Return features, (N, D), and labels, (N,), of batches."""
    rows = [read(images.load(batch.ids, batch.views))[: batch.counted] for batch in batches]
    return torch.cat(rows), torch.cat([batch.labels[: batch.counted] for batch in batches])


@torch.no_grad()
def solved(views: Views, head: str, *, penalty: float | None = None) -> tuple[float, float]:
    """Return the test accuracy of a head solved on features, and its penalty, chosen where none is given."""
    rows, world = RowsInMemory(views.rows, views.labels, views.held_out), SoloWorld()
    layer: SolvableHead
    tried: tuple[float, ...]
    fit: KernelFit | HeadFit | None
    if head == "compared":
        layer, tried = KernelHead(rows.width, CLASSES), COMPARED if penalty is None else (penalty,)
        fit = fit_kernel(rows, classes=CLASSES, world=world, memory_bytes=MEMORY, penalties=tried)
    else:
        layer, tried = nn.Linear(rows.width, CLASSES), LINEAR if penalty is None else (penalty,)
        fit = fit_softmax(rows, classes=CLASSES, world=world, penalties=tried)
    assert fit is not None, "nothing stops it"
    take(layer, fit)
    said = torch.cat([layer(part) for part in views.test.split(512)])
    return float((said.argmax(1) == views.truth).double().mean()), fit.penalty


if __name__ == "__main__":
    sys.exit(main())
