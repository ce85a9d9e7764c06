"""--metric decides on held-out samples: which model is kept, and in hvfreeze auto the head or the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvfreeze.training.evaluation import Best, Score
from tests.program import call, metrics_of, succeed, summary_of
from tests.single.training.test_auto import FAR, Told, decided
from tests.single.training.test_unequal_classes import FLAGS, save_images


def test_a_model_is_kept_by_the_metric(tmp_path: Path) -> None:
    data = ["--data", "imagefolder", "--data-dir", str(save_images(tmp_path / "images", rare=9))]
    flags = [*FLAGS.split(), "--epochs", "3", "--keep", "best", "--validation-fraction", "0.3", "--metric", "auroc"]
    succeed("train", *data, *flags, "--run-dir", str(tmp_path / "run"))
    lines, summary = metrics_of(tmp_path / "run"), summary_of(tmp_path / "run")
    found = [line["test_auroc"] for line in lines]
    kept = summary["kept"]["model"]
    assert kept["metrics"]["auroc"] == max(found) == found[kept["epoch"]] and summary["test_auroc"] == found[-1]
    assert all(0 <= line["test_macro_f1"] <= 1 for line in lines)


@pytest.mark.parametrize("fit", ["kernel", "exact"])
def test_auto_compares_by_it_whichever_head_is_fitted(fit: str, tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=9)
    flags = [*FLAGS.split(), "--head-fit", fit, "--metric", "macro-f1", "--epochs", "1"]
    outcome = call("auto", str(folder), *flags, "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 0 and "held-out accuracy" in outcome.stdout and "macro F1" in outcome.stdout
    [solved] = [line for line in metrics_of(tmp_path / "run") if line.get("verb") == "solve"]
    assert 0 <= solved["held_out_macro_f1"] <= 1
    assert solved["held_out_balanced_accuracy"] <= 1 and "held_out_auroc" not in solved


def test_a_metric_of_other_labels_is_refused(tmp_path: Path) -> None:
    outcome = call("auto", str(save_images(tmp_path / "images")), "--metric", "r2", "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2 and "accuracy, balanced-accuracy, macro-f1, auroc for classes" in outcome.stderr


@pytest.mark.parametrize(("quality", "ends"), [(0.9, "head"), (0.7, "network"), (0.8, "network")])
def test_the_better_one_by_the_metric_ends_the_run_though_its_loss_is_higher(
    quality: float, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "held_out", lambda told, _: Score(told.scores.pop(), 0.8, decides=0.8))
    monkeypatch.setattr(Told, "fit_head", lambda *_, is_fine_tuned: Score(9.0, 0.1, decides=quality))
    said: list[str] = []
    assert decided(FAR, (0.05,), said=said, monkeypatch=monkeypatch)[-1] == ("finish", ends)
    assert ("so the lower loss decides" in said[-1]) == (quality == 0.8)
    assert Best(0, 1, 0.5, 1.0, "", decides=0.5).below(Score(2.0, 0.1, decides=0.6))
