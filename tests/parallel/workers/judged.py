"""Metrics of all ranks' answers are scikit-learn's of the whole, to the last digit, whoever has which sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import metrics as reference

from hvfreeze.comm.world import World
from hvfreeze.inference.card import read_card
from hvfreeze.tasks import Classes, MultiLabel, Numbers, Task
from hvfreeze.training.evaluation import Kept, Score, add_metrics
from tests.parallel.workers.checking import let_models_be_small
from tests.parallel.workers.runs import Runs, stopped_solving

SAMPLES = 57


AUTO: dict[str, Any] = {
    "model": "shufflenet_v2_x0_5",
    "freeze": "auto",
    "weights": "none",
    "train_samples": 48,
    "batch_size": 8,
    "epochs": 1,
}


def setting(world: World, root: Path) -> Runs:
    let_models_be_small()
    return Runs(world, root, AUTO)


def found(world: World, task: Task, logits: Any, labels: Any) -> Score:
    """Return the score of answers that are dealt out to ranks; some samples are answered by two of them."""
    mine = np.arange(SAMPLES)[world.rank :: world.size]
    parts = [mine[::2], mine[1::2], np.arange(5)]
    kept = [Kept(ids, task, torch.from_numpy(logits[ids]), torch.from_numpy(labels[ids])) for ids in parts]
    return add_metrics({"model": Score(1.0, 0.5)}, {"model": kept}, task, world, chooses=False)["model"]


def check_runs_on_several_labels_and_on_numbers_go_on_where_they_stopped(runs: Runs) -> None:
    name, metric = ("pairs", "macro_f1") if runs.world.size == 2 else ("turned", "mae")
    data = f"tests.several:{name}"
    straight = runs("straight", data=data)
    # While the solver works, after a round whose thresholds were chosen.
    stopped_solving(runs, "stopped", when=lambda count, note: count == 0, data=data)
    resumed = runs("stopped", data=data, resume=True)
    assert resumed["parameter_digest"] == straight["parameter_digest"]
    assert resumed[f"test_{metric}"] == straight[f"test_{metric}"]
    if runs.world.rank == 0:
        cards = [read_card(runs.root / which / "model.yaml") for which in ("straight", "stopped")]
        assert cards[0].thresholds == cards[1].thresholds and cards[0].unit == cards[1].unit
        assert len(cards[0].thresholds) == (5 if name == "pairs" else 0)


def check_metrics_are_those_of_scikit_learn(runs: Runs) -> None:
    world = runs.world
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(SAMPLES, 4)).astype(np.float32)
    classes, several = draw.integers(0, 4, SAMPLES), (draw.random((SAMPLES, 4)) < 0.4).astype(np.float32)
    said = logits.argmax(1)
    score = found(world, Classes(4, metric="macro_f1"), logits, classes)
    assert score.metrics == {
        "accuracy": reference.accuracy_score(classes, said),
        "balanced_accuracy": reference.balanced_accuracy_score(classes, said),
        "macro_f1": reference.f1_score(classes, said, average="macro"),
    }
    assert score.decides == score.metrics["macro_f1"]
    score = found(world, Classes(4, metric="auroc"), logits, classes)
    columns = np.eye(4, dtype=np.int64)[classes]
    assert score.decides == reference.roc_auc_score(columns, logits, average="macro")
    score = found(world, MultiLabel(4), logits, several)
    assert score.metrics == {
        "average_precision": reference.average_precision_score(several, logits),
        "macro_f1": reference.f1_score(several, logits > 0, average="macro"),
        "accuracy": reference.accuracy_score(several, logits > 0),
    }
    numbers = logits**3
    score = found(world, Numbers(4), logits, numbers)
    assert score.metrics == {
        "r2": reference.r2_score(numbers.astype(np.float64), logits.astype(np.float64)),
        "mae": reference.mean_absolute_error(numbers.astype(np.float64), logits.astype(np.float64)),
    }
