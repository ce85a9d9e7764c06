"""Where classes are unequal, every accuracy has the majority's share and the balanced accuracy beside it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from hvfreeze.data.class_shares import accuracy_in_words, majority_of
from hvfreeze.metrics import balanced_accuracy
from tests.program import Outcome, call, metrics_of, succeed, summary_of

FLAGS = "--model mlp-16x16 --batch-size 8 --threads 1 --augment none"


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([9, 1], (0, 0.9)),
        ([6, 4], (0, 0.6)),
        ([59, 41], None),
        ([2, 3, 5], (2, 0.5)),
        ([10, 10, 14], None),
        ([4, 0], (0, 1.0)),
        ([0, 0], None),
        ([7], None),
    ],
)
def test_classes_are_unequal_where_one_has_half_as_many_again_as_another(
    counts: list[int], found: tuple[int, float] | None
) -> None:
    assert majority_of(counts) == (found and (found[0], pytest.approx(found[1])))


def test_balanced_accuracy_is_the_mean_recall_of_classes_that_are_there() -> None:
    assert balanced_accuracy([90, 10, 0], [90, 0, 0]) == 0.5
    assert np.isnan(balanced_accuracy([0, 0], [0, 0]))
    assert accuracy_in_words(0.92, majority=0.9, balanced=0.525) == "92.00 % (balanced 52.50 %, majority class 90.00 %)"
    assert accuracy_in_words(0.92, majority=None) == "92.00 %"


def save_images(folder: Path, *, rare: int = 2, tested: int = 1) -> Path:
    """Noise, which nothing can be learned of."""
    rng = np.random.default_rng(0)
    for part, common, other in (("train", 18, rare), ("test", 9, tested)):
        for name, count in (("common", common), ("rare", other)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module", params=["sgd", "auto"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    place = tmp_path_factory.mktemp(request.param)
    folder = save_images(place / "images", rare=4)
    data = ["--data", "imagefolder", "--data-dir", str(folder)]
    words = ["auto", str(folder), "--epochs", "1"] if request.param == "auto" else ["train", *data, "--epochs", "2"]
    outcome = succeed(*words, *FLAGS.split(), "--run-dir", str(place / "run"))
    return place / "run", outcome.stdout


def test_every_line_with_an_accuracy_can_be_trusted_alone(run: tuple[Path, str]) -> None:
    lines = [line for line in run[1].splitlines() if re.search(r"\d %", line) and "classes are imbalanced" not in line]
    assert lines and all("majority class" in line for line in lines), lines
    [note] = [line for line in run[1].splitlines() if "classes are imbalanced" in line]
    assert "81.8 % of the training samples have class common and 90.0 % of the test samples" in note
    tested = [line for line in lines if re.search(r"\| test \d|test accuracy", line)]
    assert tested and all(
        re.search(r"test (accuracy )?[\d.]+ % \(balanced [\d.]+ %, majority class 90.00 %\)", line) for line in tested
    )


def test_files_have_it_too(run: tuple[Path, str], tmp_path: Path) -> None:
    place = run[0]
    summary = summary_of(place)
    lines = metrics_of(place)
    for found in (summary, *(line for line in lines if "train_accuracy" in line)):
        assert found["train_majority_share"] == pytest.approx(18 / 22)
    for found in (summary, lines[-1]):
        assert found["test_majority_share"] == 0.9 and 0 <= found["test_balanced_accuracy"] <= 1
    card = yaml.safe_load((place / "model.yaml").read_text())
    assert card["majority_share"] == 0.9 and card["accuracy"] in (
        pytest.approx(0.9 * a + 0.1 * (2 * card["balanced_accuracy"] - a)) for a in np.arange(10) / 9
    )
    if place.parent.name.startswith("auto"):
        return
    evaluated = succeed("evaluate", str(place), "--out", str(tmp_path))
    assert "always predicting common 90.00 %" in evaluated.stdout and ", balanced " in evaluated.stdout
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["majority_share"] == 0.9 and found["balanced_accuracy"] == pytest.approx(card["balanced_accuracy"])


def test_pages_have_it_too(run: tuple[Path, str], tmp_path: Path) -> None:
    place = run[0]
    listed = call("runs", str(place.parent))
    assert re.search(r"% \(balanced [\d.]+ %, majority 90.0 %\)", listed.stdout), str(listed)
    if place.parent.name.startswith("auto"):
        return
    succeed("report", str(place), "--out", str(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert "Balanced accuracy" in page and "Majority class" in page
    assert "always answering the largest class is 90.0 % accurate" in page
    with (tmp_path / "data" / "runs.csv").open() as file:
        [row] = csv.DictReader(file)
    assert row["test_majority_share"] == "0.9"


def train_once(folder: Path, run_dir: Path) -> Outcome:
    """Train for an epoch on a folder of images."""
    flags = [*FLAGS.split(), "--epochs", "1", "--data-dir", str(folder), "--run-dir", str(run_dir)]
    return call("train", "--data", "imagefolder", *flags)


def test_nothing_is_said_where_classes_are_equal(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=18, tested=9)
    outcome = train_once(folder, tmp_path / "run")
    assert outcome.returncode == 0 and "majority" not in outcome.stdout and "unequal" not in outcome.stdout, str(
        outcome
    )
    for name in ("summary.json", "metrics.jsonl"):
        text = (tmp_path / "run" / name).read_text()
        assert "balanced" not in text and "majority" not in text
    assert "balanced" not in call("evaluate", str(tmp_path / "run")).stdout
    assert "majority" not in call("runs", str(tmp_path)).stdout


def test_a_test_set_of_one_class_is_told(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=18, tested=0)
    outcome = train_once(folder, tmp_path / "run")
    assert "100.0 % of the test samples have class common" in outcome.stdout, str(outcome)
    assert re.search(r"\| test [\d.]+ % \(balanced [\d.]+ %, majority class 100.00 %\)", outcome.stdout)


def test_models_with_labels_of_their_own_are_judged_by_these(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", rare=18, tested=9)
    rows = ["split,sample,even,odd"]
    for part, count in (("train", 18), ("test", 9)):
        names = [f"{name}/{number}.png" for name in ("common", "rare") for number in range(count)]
        rows += [f"{part},{name},{number % 2},{int(number % 9 == 0)}" for number, name in enumerate(names)]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    flags = [
        "--data",
        "imagefolder",
        *FLAGS.split(),
        "--strategy",
        "shared-trunk",
        "--tasks",
        str(tmp_path / "labels.csv"),
        "--epochs",
        "1",
    ]
    succeed("train", *flags, "--data-dir", str(folder), "--run-dir", str(tmp_path / "run"))
    models = summary_of(tmp_path / "run")["models"]
    assert "test_majority_share" not in models["model-even"] and models["model-odd"][
        "test_majority_share"
    ] == pytest.approx(16 / 18)
