"""Metrics of all ranks' answers are scikit-learn's of the whole, to the last digit, whoever has which sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import metrics as reference

from hvfreeze.comm.world import World
from hvfreeze.tasks import Classes, MultiLabel, Numbers, Task
from hvfreeze.training.evaluation import Kept, Score, judged

SAMPLES = 57


def setting(world: World, root: Path) -> World:
    return world


def found(world: World, task: Task, logits: Any, labels: Any) -> Score:
    """Return the score of answers that are dealt out to ranks; some samples are answered by two of them."""
    mine = np.arange(SAMPLES)[world.rank :: world.size]
    parts = [mine[::2], mine[1::2], np.arange(5)]
    kept = [Kept(ids, task, torch.from_numpy(logits[ids]), torch.from_numpy(labels[ids])) for ids in parts]
    return judged({"model": Score(1.0, 0.5)}, {"model": kept}, task, world, chooses=False)["model"]


def check_metrics_are_those_of_scikit_learn(world: World) -> None:
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
    score = found(world, Numbers(4), logits, logits**3)
    assert score.metrics == {
        "r2": reference.r2_score(logits**3, logits),
        "mae": reference.mean_absolute_error(logits**3, logits),
    }
