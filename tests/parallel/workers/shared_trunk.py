"""Every rank trains models on one trunk; each must be the one that is trained alone, and every byte is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.config.tree import Config
from hvfreeze.inference.card import read_card
from hvfreeze.training.build import prepare
from hvfreeze.training.run import run
from tests.parallel.twins.shared_trunk import Alone, seeded
from tests.parallel.workers import checking
from tests.parallel.workers.checking import as_runs_lay_out, differing, small_resnet
from tests.parallel.workers.runs import lines, see_that_stopped_runs_go_on

BATCH, STEPS, EPOCHS, LR = 8, 3, 2, 0.03
BOUNDARIES = {1: 16 * 16 * 16, 2: 16 * 16 * 16, 3: 32 * 8 * 8, 4: 64 * 4 * 4}
"""Numbers of a sample behind the stem and the three residual blocks, for 16 pixels."""
SPARE = 5
"""Samples that an epoch leaves out."""


laid_out = as_runs_lay_out(small_resnet)


class Trial(checking.Trial):
    """Runs of a small network; see `checking.Trial`."""

    def __init__(self, world: World, root: Path) -> None:
        super().__init__(world, root, small_resnet)
        self.shown: dict[str, Any] = {}

    def config(self, name: str, **changes: Any) -> Config:
        base = {
            "strategy": "shared-trunk",
            "train_samples": (STEPS * BATCH + SPARE) * 5 // 4 + 1,
            "batch_size": BATCH,
            "image_size": 16,
            "epochs": EPOCHS,
            "lr": LR,
            "weight_decay": 1e-2,
            "cut_by": "count",
        }
        return super().config(name, **{**base, **changes})

    def alone(self, name: str, *, own: tuple[str, ...], seed: int, labels: Tensor, **options: Any) -> dict[str, Tensor]:
        """The twin of one model of the run `name`, trained on rank 0."""
        prepared = prepare(self.config(f"data-of-{name}-{seed}", heads=1, **self.shown), SoloWorld())
        base, classes = seeded(laid_out, 10, 0), int(labels.max()) + 1
        settings = {"lr": LR, "momentum": 0.9, "weight_decay": 1e-2, **options}
        twin = Alone(base, seeded(laid_out, classes, seed), own, **settings)
        for epoch in range(EPOCHS):
            batches = prepared.feed.epoch(epoch)
            assert len(batches) == STEPS
            twin.train([(prepared.feed.images.load(b.ids, b.views), labels[torch.from_numpy(b.ids)]) for b in batches])
        return twin.model.state_dict()

    def compare(self, name: str, model: str, expected: dict[str, Tensor]) -> None:
        found = torch.load(self.root / name / f"model-{model}.pt", weights_only=True)
        wrong = differing(found, expected)
        assert wrong == [], f"{name}, {model}: not the model that is trained alone: {wrong}"

    def wire_bytes(self, name: str) -> list[dict[str, int]]:
        """What each epoch of a run sent, by lane."""
        sums = [line["trunk"]["wire_bytes"] for line in lines(self.root / name, "metrics")]
        return [{k: now[k] - before[k] for k in now} for before, now in zip([dict.fromkeys(sums[0], 0), *sums], sums)]


def digits_labels() -> Tensor:
    from hvfreeze.data.data_sets import open_data

    return open_data("digits").train.labels


def inner(summary: dict[str, Any]) -> list[int]:
    return [stop for _, stop in summary["trunk"]["segments"][:-1]]


def check_heads_are_those_that_are_trained_alone_also_from_a_cache(trial: Trial) -> None:
    """More models than ranks, labels that ride along; whole trunks give the same models, later epochs send nothing."""
    size, count = trial.world.size, trial.world.size + 1
    given = {"heads": count, "head_lr": ",".join(["0.01", *["0.03"] * size]), "augment": "none", "labels": "ride"}
    summary = run(trial.config("heads", **given), trial.world)
    whole = run(trial.config("whole", trunk="whole", **{**given, "labels": None}), trial.world)
    assert summary["parameter_digest"] == whole["parameter_digest"], "the baseline gives other models"
    assert summary["allreduce_bytes"] == 0 and summary["cut_history"] == [[0, 0, 4]]

    steps = STEPS * EPOCHS
    segments = summary["trunk"]["segments"]
    last = len(segments) - 1
    per_batch = {
        "activations": sum(4 * BATCH * BOUNDARIES[stop] for stop in inner(summary)),
        "features": (size - 1) * 4 * BATCH * BOUNDARIES[4],
        "labels": 8 * BATCH * (last * count + sum(1 for i in range(count) if i % size != last)),
    }
    assert summary["trunk"]["wire_bytes"] == {lane: steps * number for lane, number in per_batch.items()}, per_batch
    assert summary["trunk"]["forwards"] == [steps] * size
    assert whole["trunk"]["forwards"] == [steps] * size and sum(whole["trunk"]["wire_bytes"].values()) == 0
    held, all_of_it = summary["trunk"]["trunk_bytes"], whole["trunk"]["trunk_bytes"]
    assert sum(held) == all_of_it[0] > max(held)

    cached = run(trial.config("cached", cache="on", **given), trial.world)
    assert cached["parameter_digest"] == summary["parameter_digest"] and cached["cache"]["exact"]
    # One batch more than the epoch's, of the samples that it leaves out.
    assert cached["trunk"]["forwards"] == [STEPS + 1] * size
    assert cached["cache"]["rows_read"] >= STEPS * BATCH * (EPOCHS - 1) * size, cached["cache"]
    if trial.world.rank == 0:
        first, *later = trial.wire_bytes("cached")
        assert later == [{"activations": 0, "features": 0, "labels": 0}] * (EPOCHS - 1), later
        assert first["activations"] == (STEPS + 1) * per_batch["activations"]
        labels = digits_labels()
        trial.shown = {"augment": "none"}
        for i, lr in ((0, 0.01), (size, LR)):
            trial.compare("heads", f"head{i}", trial.alone("heads", own=("fc",), seed=i, labels=labels, lr=lr))
        line = lines(trial.root / "heads", "metrics")[-1]
        assert set(line["models"]) == {f"model-head{i}" for i in range(count)}
        accuracies = [entry["test_accuracy"] for entry in line["models"].values()]
        assert abs(line["test_accuracy"] - sum(accuracies) / count) < 1e-12
    trial.world.barrier(name="test.heads")


def check_tasks_have_their_own_labels_depths_and_losses(trial: Trial) -> None:
    """Fewer models than ranks at 3; labels sent directly; one of the models trains two blocks."""
    folder, digits = trial.root / "tasks", digits_labels()
    if trial.world.rank == 0:
        folder.mkdir()
        rows = [f"{i},{'odd' if d % 2 else 'even'},{d // 4}" for i, d in enumerate(digits.tolist())]
        (folder / "labels.csv").write_text("\n".join(["sample,parity,size", *rows]) + "\n")
        (folder / "tasks.yaml").write_text(
            "labels: labels.csv\ntasks:\n  parity: {head: 2, lr: 0.02}\n"
            "  rough: {column: size, loss: balanced, seed: 9}\n"
        )
    trial.world.barrier(name="test.tasks")
    given = {"tasks": str(folder / "tasks.yaml"), "augment": "views:2"}
    summary = run(trial.config("tasks-run", labels="direct", **given), trial.world)
    assert summary["cut_history"] == [[0, 0, 3]]
    segments = summary["trunk"]["segments"]
    source = {d: next(p for p, (a, b) in enumerate(segments) if a < d <= b) for d in (3, 4)}
    owner = {3: 0, 4: 1}
    expected = sum(4 * BATCH * BOUNDARIES[d] for d in (3, 4) if source[d] != owner[d])
    assert summary["trunk"]["wire_bytes"]["features"] == STEPS * EPOCHS * expected
    assert summary["trunk"]["wire_bytes"]["labels"] == STEPS * EPOCHS * 8 * BATCH
    if trial.world.rank == 0:
        trial.shown = {"augment": "views:2"}
        odd, rough = digits % 2, digits // 4
        twin = trial.alone("tasks", own=("layer3", "fc"), seed=0, labels=odd, lr=0.02)
        trial.compare("tasks-run", "parity", twin)
        used = prepare(trial.config("used", heads=1), SoloWorld())
        counts = torch.bincount(rough[torch.from_numpy(used.feed.plan.shards[0])], minlength=3).float()
        weights = counts.sum() / (3 * counts)
        twin = trial.alone("tasks", own=("fc",), seed=9, labels=rough, class_weights=weights)
        trial.compare("tasks-run", "rough", twin)
        cards = [read_card(trial.root / "tasks-run" / f"model-{name}.yaml") for name in ("parity", "rough")]
        assert [card.classes for card in cards] == [("even", "odd"), ("0", "1", "2")]
        trial.shown = {}
    trial.world.barrier(name="test.tasks.done")


def check_a_resumed_run_is_the_uninterrupted_one(trial: Trial) -> None:
    given = {"heads": 3, "head_blocks": 2, "labels": "ride", "checkpoint_every": "2steps", "schedule": "cosine"}
    see_that_stopped_runs_go_on(partial(trial.config, **given), trial.world, [STEPS + 1], without=["trunk"])


setting = Trial
