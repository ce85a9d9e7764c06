"""Runs on several labels a sample and on numbers: trained, fitted, resumed, applied, evaluated and reported."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import f1_score, r2_score

import hvfreeze
from hvfreeze.training.evaluation import Score
from hvfreeze.training.verbs import packed, unpacked
from tests.program import call, succeed, summary_of
from tests.several import pairs, turned

FLAGS = ["--model", "mlp-16x16", "--threads", "1", "--batch-size", "16"]
CONVOLUTIONS = ["--model", "tests.kept.small_model:small"]  # of images of any size
CACHED = "--epochs 2 --freeze static --cut 2"
MADE = {"pairs": pairs, "turned": turned}


@pytest.fixture(scope="module", params=["pairs", "turned"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    run = tmp_path_factory.mktemp(request.param) / "run"
    outcome = succeed(
        "auto", f"tests.several:{request.param}", *CONVOLUTIONS, *FLAGS[2:], "--epochs", "1", "--run-dir", str(run)
    )
    return request.param, run, outcome.stdout


def test_a_fitted_head_answers_and_the_log_says_how_well(finished: tuple[str, Path, str]) -> None:
    name, run, log = finished
    summary = summary_of(run)
    if name == "pairs":
        assert summary["test_macro_f1"] > 0.6 and summary["test_average_precision"] > 0.75
        assert "5 labels; 1 rank" in log and "mean average precision" in log
    else:
        assert summary["test_r2"] > 0.7 and summary["test_mae"] < 20 and summary["test_accuracy"] is None
        assert "1 number; 1 rank" in log and "accuracy" not in log


def test_evaluate_finds_what_the_run_reported_and_scikit_learn_too(
    finished: tuple[str, Path, str], tmp_path: Path
) -> None:
    name, run, _ = finished
    outcome = succeed("evaluate", str(run), "--trust-code", "--out", str(tmp_path))
    found, summary = json.loads((tmp_path / "evaluation.json").read_text()), summary_of(run)
    applied, tested = hvfreeze.load_model(run, trust_code=True), MADE[name]("test")
    logits = applied.logits(torch.stack([applied.transform(image) for image in tested.images])).numpy()
    card = yaml.safe_load((run / "model.yaml").read_text())
    if name == "pairs":
        given = 1 / (1 + np.exp(-logits.astype(np.float64))) > np.array(card["thresholds"])
        wanted = f1_score(tested.targets, given, average="macro")
        assert found["macro_f1"] == summary["test_macro_f1"] == pytest.approx(wanted, abs=0.02)
        rows = list(csv.DictReader((tmp_path / "labels.csv").read_text().splitlines()))
        assert [row["label"] for row in rows] == tested.classes
        assert np.mean([float(row["f1"]) for row in rows]) == pytest.approx(found["macro_f1"])
    else:
        degrees = logits * card["unit"] + card["offset"]
        assert (
            found["r2"]
            == pytest.approx(summary["test_r2"])
            == pytest.approx(r2_score(tested.targets, degrees), abs=1e-3)
        )
        assert found["mae"] == pytest.approx(float(np.abs(tested.targets - degrees).mean()), rel=1e-3)
        assert "degrees" in outcome.stdout


def test_predict_writes_labels_with_their_probabilities_or_numbers(
    finished: tuple[str, Path, str], tmp_path: Path
) -> None:
    name, run, _ = finished
    tested = MADE[name]("test")
    for number, image in enumerate(tested.images[:20]):
        image.save(tmp_path / f"{number:02}.png")
    outcome = succeed("predict", str(run), str(tmp_path), "--trust-code")
    rows = list(csv.DictReader(outcome.stdout.splitlines()))
    assert len(rows) == 20
    if name == "pairs":
        card = yaml.safe_load((run / "model.yaml").read_text())
        threshold = dict(zip(card["classes"], card["thresholds"]))
        pairs_of = [
            list(zip(row["labels"].split(","), row["probabilities"].split(","))) for row in rows if row["labels"]
        ]
        assert pairs_of and all(float(chance) > threshold[label] for row in pairs_of for label, chance in row)
    else:
        said = [float(row["degrees"]) for row in rows]
        assert np.corrcoef(said, tested.targets[:20, 0])[0, 1] > 0.7
    outcome = call("predict", str(run), str(tmp_path), "--trust-code", "--top", "2")
    assert outcome.returncode == 2 and "is for classes, and the model predicts" in outcome.stderr


def test_a_file_of_the_parameters_has_thresholds_or_units(finished: tuple[str, Path, str], tmp_path: Path) -> None:
    name, run, _ = finished
    safetensors, out = pytest.importorskip("safetensors"), tmp_path / "model.safetensors"
    succeed("export", str(run), "--trust-code", "--format", "safetensors", "--out", str(out))
    with safetensors.safe_open(out, "pt") as file:
        facts = {key: json.loads(file.metadata()[key]) for key in ("thresholds", "unit", "offset")}
    card = yaml.safe_load((run / "model.yaml").read_text())
    assert facts == {key: card.get(key) or [] for key in facts}
    assert bool(facts["thresholds"]) == (name == "pairs") and bool(facts["unit"]) == (name == "turned")


def test_thresholds_of_a_head_that_has_not_converged_are_kept() -> None:
    score = Score(math.inf, 0.5, thresholds=(0.25, 0.75))
    assert unpacked(packed(score)) == score and unpacked(packed(Score(1.0, 0.5))) == Score(1.0, 0.5)


def test_pages_have_their_metrics(finished: tuple[str, Path, str], tmp_path: Path) -> None:
    name, run, _ = finished
    if name == "pairs":
        succeed("report", str(run), "--out", str(tmp_path))
        assert "Mean average precision" in (tmp_path / "index.html").read_text()
    assert ("macro F1" if name == "pairs" else "R^2") in call("runs", str(run.parent)).stdout


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("turned", "--epochs 2 --lr 0.05 --mixup 0.2 --freeze coherence --interval 2 --freeze-warmup 4"),
        ("pairs", f"{CACHED} --augment views:2 --cache on --keep best --validation-fraction 0.2"),
        ("pairs", "--epochs 1 --strategy grid"),
        ("turned", "--epochs 1 --strategy local-sgd --local-steps 2"),
        ("pairs", "--head multi-level --head-fit exact --augment none"),
    ],
)
def test_every_way_to_train_takes_them(name: str, flags: str, tmp_path: Path) -> None:
    data = ["--data", f"tests.several:{name}", "--train-samples", "80"]
    model = CONVOLUTIONS if name == "pairs" else []
    succeed("train", *data, *FLAGS, *model, *flags.split(), "--run-dir", str(tmp_path))
    summary = summary_of(tmp_path)
    assert "test_macro_f1" in summary if name == "pairs" else "test_r2" in summary
    card = yaml.safe_load((tmp_path / "model.yaml").read_text())
    chosen = "--validation-fraction" in flags or "exact" in flags
    assert len(card["thresholds"]) == (5 if chosen and name == "pairs" else 0)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("pairs", "--class-weights balanced", "which has several labels per sample"),
        ("turned", "--label-smoothing 0.1", "which has numbers"),
        ("pairs", "--loss huber", "it is for numbers"),
        ("pairs", "--metric auroc", "average-precision, macro-f1 for labels"),
        ("turned", "--strategy local-critics --model resnet20", "which has numbers"),
        ("pairs", "--strategy shared-trunk --heads 2", "which has several labels per sample"),
    ],
)
def test_what_needs_classes_is_refused_by_name(name: str, flags: str, message: str, tmp_path: Path) -> None:
    words = ["--model", "mlp-16x16", "--epochs", "1", *flags.split()]
    outcome = call("train", "--data", f"tests.several:{name}", *words, "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2 and message in outcome.stderr, str(outcome)


def test_huber_and_squared_losses_train_other_models(tmp_path: Path) -> None:
    digests = set()
    for loss in ("squared", "huber"):
        flags = ["--data", "tests.several:turned", *FLAGS, "--epochs", "1", "--train-samples", "64", "--loss", loss]
        succeed("train", *flags, "--run-dir", str(tmp_path / loss))
        digests.add(summary_of(tmp_path / loss)["parameter_digest"])
    assert len(digests) == 2
