"""Tasks with different distances to the pretraining: their runs, their images of dots, and their page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from analysis import dots, rotated, spoiled, tasks
from analysis.sweeps.kept import KeptRuns
from analysis.sweeps.launching import Site, command_of
from analysis.sweeps.presets import REDUCED, Preset
from analysis.sweeps.results import Results
from tests.single.analysis.runs_material import made_up

SEEDS = (0, 1)


def test_an_image_has_as_many_dots_as_its_label_says() -> None:
    images, labels = dots.draw(60, seed=3)
    bright = (images.min(axis=3) >= dots.BRIGHT[0]).sum(axis=(1, 2))
    assert list(bright) == [dots.DOT**2 * label for label in labels]
    assert set(labels) == set(range(1, dots.MOST + 1))


def test_a_turned_image_is_in_the_folder_of_its_angle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated, "PARTS", {"train": (8, 0), "test": (4, 1)})
    original = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for part in rotated.PARTS:
        place = tmp_path / "cifar" / part / "cat"
        place.mkdir(parents=True)
        for number in range(8):
            Image.fromarray(original).save(place / f"{number}.png")
    assert rotated.main([str(tmp_path / "cifar"), str(tmp_path / "turned")]) == 0
    written = sorted((tmp_path / "turned").glob("*/*/*.png"))
    assert len(written) == 12 and len({path.parent.name for path in written}) > 1
    for path in written:
        turned = np.rot90(original, int(path.parent.name) // 90)
        assert np.array_equal(np.asarray(Image.open(path)), turned)


def test_labels_are_wrong_and_classes_rare_in_training_images_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"IMAGES": 20, "TEST_IMAGES": 4, "MOST": 10}.items():
        monkeypatch.setattr(spoiled, name, value)
    words = [str(tmp_path / "cifar"), str(tmp_path / "made")]
    with pytest.raises(SystemExit, match="2"):
        spoiled.main(words)
    assert "has too few images in {train,test}/CLASS: none" in capsys.readouterr().err
    for part, count in (("train", 10), ("test", 2)):
        for kind in ("cat", "dog"):
            place = tmp_path / "cifar" / part / kind
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}.png").write_text(kind)
    assert spoiled.main(words) == 0

    def found(task: str, part: str) -> list[tuple[str, str]]:
        return [(path.parent.name, path.read_text()) for path in (tmp_path / "made" / task / part).glob("*/*")]

    wrong = found("wrong-labels", "train")
    assert len(wrong) == 20 and sum(label != kind for label, kind in wrong) == spoiled.WRONG * 20
    assert sorted(found("rare-classes", "train")) == [("cat", "cat")] * 10 + [("dog", "dog")] * 6
    for task in ("wrong-labels", "rare-classes"):
        assert sorted(found(task, "test")) == [("cat", "cat")] * 2 + [("dog", "dog")] * 2
    (tmp_path / "cifar" / "test" / "dog" / "0.png").unlink()
    with pytest.raises(SystemExit, match="2"):
        spoiled.main(words)
    assert "dog 1 of 2" in capsys.readouterr().err


def test_all_ways_of_a_seed_follow_each_other_and_find_their_data_and_weights() -> None:
    planned = tasks.runs(REDUCED)
    ways = ["auto", "auto1", "full", "full16", "full2", "full4", "full16low", "auto2", "auto4", "auto8"]
    assert [run.name for run in planned[:10]] == [f"photographs-{way}-s0" for way in ways]
    assert planned[10].name == "counting-auto-s0"
    site = Site(work=Path("work"), data_dir=Path("/data"), weights=Path("/kept/resnet18-cifar100-32px-fp16.pt"))
    command = command_of(planned[0], site, Path("work/a"))
    assert command[command.index("auto") + 1] == "/data/photographs"
    assert command[command.index("--weights") + 1] == "/kept/efficientnet-lite0-imagenet-fp16.pt"
    few = [run for run in planned if run.label.startswith("few-counting-") and run.seed == planned[0].seed]
    assert [run.label.rpartition("-")[2] for run in few] == ["auto", "auto1", "full", "full16", "full16low"]
    command = command_of(few[0], site, Path("work/a"))
    assert command[command.index("auto") + 1] == "/data/counting"
    assert command[command.index("--train-samples") + 1] == "600"
    plain = command_of(Preset().run("a", 0), site, Path("work/a"))
    assert plain[plain.index("--data-dir") + 1] == "/data"


def results_of(folder: Path, *, worse: float) -> Results:
    """Two synthetic seeds of counting; seed 0 continues after the trial, and its first epoch was slowed down."""
    preset, root = Preset(seeds=SEEDS), folder / "results"
    kept = KeptRuns(root / "tasks")
    planned = [run for run in tasks.runs(preset) if run.label.startswith("counting")]
    for run in planned:
        run_dir = made_up(run, Site(work=folder / "work"))
        path = run_dir / "summary.json"
        summary = json.loads(path.read_text())
        if run.label == "counting-auto":
            tuned = {"stage": "tune", "steps": 0 if run.seed else 40}
            summary["stages"] = [{"stage": "solve", "steps": 10}, {"stage": "try", "steps": 10}, tuned]
            after = 1.0 - 0.1 * (not run.seed)
            summary["trial"] = {"before": 1.0, "after": after, "way": "adamw"}
            if run.seed:
                # Of an earlier source.
                summary["trial"]["ways"] = {"adamw": after, "sgd": None}
            summary["test_accuracy"] = 0.9 - worse - 0.01 * run.seed
            slow(run_dir / "metrics.jsonl", epoch=1, times=20.0)
        else:
            if run.label == "counting-full16low":
                for epoch in range(len((run_dir / "metrics.jsonl").read_text().splitlines())):
                    slow(run_dir / "metrics.jsonl", epoch=epoch, times=7.0)
            summary["test_accuracy"] = 0.9 - (worse if run.label == "counting-auto2" else 0.0)
        path.write_text(json.dumps(summary))
        kept.keep(run_dir, run, source="abc")
    return tasks.EXPERIMENT.open(root)


def slow(path: Path, *, epoch: int, times: float) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    line = lines[epoch]
    line["seconds"] = {phase: times * value for phase, value in line["seconds"].items()}
    line["train_seconds"] *= times
    line["images_per_second"] /= times
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_epoch_that_was_slowed_down_counts_at_the_pace_of_the_others(tmp_path: Path) -> None:
    results = results_of(tmp_path, worse=0.0)
    run = results.runs["counting-auto-s0"]
    usual = run.metrics[0]["train_seconds"]
    assert run.metrics[1]["train_seconds"] == pytest.approx(20 * usual)
    judging = 19 * run.metrics[0]["seconds"]["optimizer"]
    assert judging > 0, "updates take no time: this says nothing"
    others = [usual] * (len(run.metrics) - 2)
    assert tasks.paced(run) == pytest.approx([usual, usual + judging, *others]), "updates keep their own seconds"
    assert tasks.paced_results(results).rows[0]["train_seconds"] == pytest.approx(usual * len(run.metrics) + judging)


def test_the_better_learning_rate_is_chosen_on_seeds_of_both_and_has_the_time_of_equal_work(tmp_path: Path) -> None:
    results = results_of(tmp_path, worse=0.0)
    high, low = "counting-full16", "counting-full16low"
    rows = [row for row in results.rows if row["label"] != low or row["seed"] == 0]
    for row in rows:
        if row["label"] in (high, low):
            # The higher rate is more accurate on average, the lower one on the seed that both have.
            row["test_accuracy"] = {(high, 0): 0.5, (high, 1): 0.9, (low, 0): 0.6}[row["label"], row["seed"]]
    results = replace(results, rows=rows)
    assert tasks.best_full(results, "counting", ("full16", "full16low")) == low
    paced = tasks.paced_results(results)
    assert paced.values(low, "train_seconds") == {0: paced.values(high, "train_seconds")[0]}
