"""--keep best and --early-stop: the very model of that epoch, also when the run was stopped and went on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hvfreeze
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import Preempted, RefusedError
from hvfreeze.strategies.base import MODEL
from hvfreeze.training import loop
from hvfreeze.training.evaluation import Best, Score
from hvfreeze.training.job import Job
from hvfreeze.training.run import run

STEPS = 2
ACCURACIES = (0.2, 0.5, 0.7, 0.7, 0.6, 0.9)
"""After each epoch; the fourth has the same accuracy and a higher loss."""
BEST, LAST = 2, 4
"""The best epoch before two evaluations in a row find nothing better, and the one after which that is so."""


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    base = {"model": "mlp-16x16", "train_samples": 40, "validation_fraction": 0.2, "batch_size": 16}
    base |= {"epochs": 6, "lr": 0.01, "threads": 1, "quiet": True, "checkpoint_every": "1", "run_dir": str(directory)}
    return {**base, "keep": "best", "early_stop": 2, **changes}


def trained(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    *,
    accuracies: Sequence[float] = ACCURACIES,
    leave_in: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Run with evaluations that find `accuracies`; with `leave_in` it is asked to leave in that epoch's first step."""

    def evaluate(strategy: Any, *_: Any, chooses: bool) -> dict[str, Score]:
        done = int(strategy.freezer.step)
        return {MODEL: Score(1.0 + done / 100, accuracies[done // STEPS - 1])}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    make_step = loop.train_step

    def step(job: Job, batches: Any) -> float:
        job.asked_to_leave = job.asked_to_leave or job.step == STEPS * (leave_in or 99)
        return make_step(job, batches)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", step)
        return run(from_dict(settings(directory, **changes)), SoloWorld())


def model_in(directory: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(directory / "model.pt", weights_only=True))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def test_the_best_model_is_kept_and_training_stops_without_a_better_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    summary = trained(monkeypatch, tmp_path / "best")
    assert summary["epochs"] == LAST + 1 and summary["test_accuracy"] == ACCURACIES[LAST]
    assert summary["kept"][MODEL]["epoch"] == BEST and summary["kept"][MODEL]["step"] == STEPS * (BEST + 1)
    assert "stopped early: no improvement in 2 evaluations" in (tmp_path / "best" / "log.txt").read_text()
    plain = trained(monkeypatch, tmp_path / "plain", epochs=BEST + 1, keep="last", early_stop=None)
    assert same(model_in(tmp_path / "best"), model_in(tmp_path / "plain")), "not the model of the best epoch"
    assert summary["parameter_digest"] != plain["parameter_digest"] == summary["kept"][MODEL]["parameter_digest"]
    card = hvfreeze.load_model(tmp_path / "best").card
    assert (card.accuracy, card.epochs, card.steps) == (0.7, BEST + 1, STEPS * (BEST + 1))
    assert card.parameter_digest == plain["parameter_digest"] and card.accuracy_on == "held-out"
    # A run that has ended early has ended.
    before = (tmp_path / "best" / "metrics.jsonl").read_text()
    assert trained(monkeypatch, tmp_path / "best", resume=True) == json.loads(
        (tmp_path / "best" / "summary.json").read_text()
    )
    assert (tmp_path / "best" / "metrics.jsonl").read_text() == before


def test_a_run_that_was_stopped_keeps_the_same_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = trained(monkeypatch, tmp_path / "straight")
    for epoch in (BEST, BEST + 1):
        directory = tmp_path / str(epoch)
        with pytest.raises(Preempted):
            trained(monkeypatch, directory, leave_in=epoch)
        resumed = trained(monkeypatch, directory, resume=True)
        assert resumed["kept"] == expected["kept"] and resumed["epochs"] == expected["epochs"]
        assert same(model_in(directory), model_in(tmp_path / "straight"))


def test_going_on_from_an_older_checkpoint_the_best_is_the_one_of_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short, directory, folder = {"epochs": 3, "early_stop": None}, tmp_path / "run", tmp_path / "run" / "checkpoints"
    trained(monkeypatch, tmp_path / "first", epochs=1, early_stop=None)
    trained(monkeypatch, directory, accuracies=(0.5, 0.4, 0.9), **short)
    assert not same(model_in(directory), model_in(tmp_path / "first"))
    links = sorted(path.name for path in folder.glob("best-*"))
    # That of the checkpoint that gave way to the last one goes with the next.
    assert links == [f"best-step-{step:08d}.model.pt" for step in (STEPS, 2 * STEPS, 3 * STEPS)]
    (folder / f"step-{3 * STEPS:08d}.pt").unlink()
    trained(monkeypatch, directory, accuracies=(0.5, 0.4, 0.3), resume=True, **short)
    assert same(model_in(directory), model_in(tmp_path / "first")), "a model of the future that was lost was kept"
    for link in folder.glob("best-*"):
        link.unlink()
    (directory / "summary.json").unlink()
    with pytest.raises(RefusedError, match=r"best-step-.*\.model\.pt, the best model so far, is missing"):
        trained(monkeypatch, directory, resume=True, **short)


def test_of_models_that_are_as_often_right_the_one_of_lower_loss_is_better() -> None:
    best = Best(0, 1, 0.5, 1.0, "")
    assert best.below(Score(0.9, 0.5)) and best.below(Score(2.0, 0.6))
    assert not best.below(Score(1.0, 0.5)) and not best.below(Score(float("nan"), 0.5))
    overflown = Best(0, 1, 0.5, float("nan"), "")
    assert overflown.below(Score(2.0, 0.5)) and not overflown.below(Score(float("nan"), 0.5))


def test_models_are_written_in_no_phase_of_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    under_way = []
    monkeypatch.setattr(
        "hvfreeze.training.run.export", lambda job, *, digest: under_way.append(job.clock.enter("checkpoint"))
    )
    trained(monkeypatch, tmp_path, epochs=1, keep="last", early_stop=None)
    assert under_way == ["checkpoint"]
