"""`hvfreeze evaluate`: the run's own accuracy and loss again, every class, and the table of confusions."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import hvfreeze
from hvfreeze.applying.confusion import plot_confusion
from hvfreeze.applying.evaluating import Result, class_rows, measure, say
from hvfreeze.applying.samples import Samples, own_samples, samples_in
from tests.program import call
from tests.single.applying.conftest import CLASSES, Finished
from tests.single.applying.test_predicting import refused


def test_the_runs_own_samples_give_what_the_run_reported(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = call("evaluate", str(finished.run), "--out", str(out))
    accuracy, line = finished.summary["test_accuracy"], finished.last_epoch
    assert outcome.returncode == 0, str(outcome)
    first, second, *table = outcome.stdout.splitlines()
    told = f"top-1 {100 * accuracy:.2f} % ({round(21 * accuracy)} of 21), loss {line['test_loss']:.4f}"
    assert first == f"shufflenet_v2_x0_5 on 21 test samples of the run's data: {told}"
    assert second == "as the run reported" and [row.split()[0] for row in table[1:4]] == list(CLASSES)
    found = json.loads((out / "evaluation.json").read_text())
    assert found["accuracy"] == accuracy and found["loss"] == pytest.approx(line["test_loss"], rel=1e-12)
    assert found["samples"] == 21 and found["top5_accuracy"] == 1.0
    with (out / "confusion.csv").open() as file:
        counts = {row.pop("true class"): {name: int(n) for name, n in row.items()} for row in csv.DictReader(file)}
    assert list(counts) == list(CLASSES) and all(sum(row.values()) == 7 for row in counts.values())
    assert sum(counts[name][name] for name in CLASSES) == found["correct"]
    with (out / "classes.csv").open() as file:
        for row in csv.DictReader(file):
            assert float(row["recall"]) == counts[row["class"]][row["class"]] / 7
    assert (out / "confusion.png").stat().st_size > 5000 and "<svg" in (out / "confusion.svg").read_text()


def test_images_of_a_folder_are_evaluated_wherever_their_classes_lie(finished: Finished, tmp_path: Path) -> None:
    applied = hvfreeze.load(finished.run)
    own = measure(applied, own_samples(applied, finished.run))
    for folder in (finished.images, finished.images / "test"):
        again = measure(applied, samples_in(applied, folder))
        assert torch.equal(again.confusion, own.confusion) and again.loss == own.loss
    shutil.copytree(finished.images / "test" / "red", tmp_path / "val" / "red")
    outcome = call("evaluate", str(finished.run), "--data-dir", str(tmp_path))
    assert outcome.returncode == 0 and f"on 7 images of {tmp_path / 'val'}: top-1" in outcome.stdout, str(outcome)
    assert "run reported" not in outcome.stdout and "blue" not in outcome.stdout


def test_held_out_samples_are_evaluated_where_the_run_was(tmp_path: Path) -> None:
    flags = ["--model", "shufflenet_v2_x0_5", "--train-samples", "60", "--validation-fraction", "0.4", "--quiet"]
    flags += [
        "--batch-size",
        "16",
        "--epochs",
        "1",
        "--threads",
        "1",
        "--lr",
        "0.01",
        "--freeze",
        "static",
        "--cut",
        "2",
    ]
    run = tmp_path / "run"
    assert call("train", *flags, "--run-dir", str(run)).returncode == 0
    outcome = call("evaluate", str(run))
    assert "held-out samples of the run's data: top-1" in outcome.stdout and "top-5" in outcome.stdout, str(outcome)
    assert "as the run reported" in outcome.stdout
    line = json.loads((run / "metrics.jsonl").read_text())
    applied = hvfreeze.load(run)
    assert measure(applied, own_samples(applied, run)).loss == pytest.approx(line["test_loss"], rel=1e-12)


def test_counts_are_by_true_class_and_answer(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    applied = hvfreeze.load(finished.run)
    result = Result(torch.tensor([[2, 1, 0], [0, 3, 0], [0, 0, 0]]), 6, 0.5)
    rows = class_rows(applied, result)
    assert [row["recall"] for row in rows] == [pytest.approx(2 / 3), 1.0, None]
    assert [row["precision"] for row in rows] == [1.0, 0.75, None]
    assert (result.count, result.correct, result.accuracy) == (6, 5, 5 / 6)
    say(applied, Samples(lambda row: None, torch.zeros(6), "samples", own=True), result)  # type: ignore[arg-type,return-value]
    assert "the run reported" in capsys.readouterr().out


def test_a_figure_of_many_classes_names_none_and_of_few_tells_counts() -> None:
    few = plot_confusion(torch.tensor([[3, 1], [0, 4]]), ["a" * 40, "$b$"]).axes[0]
    assert [text.get_text() for text in few.texts] == ["3", "1", "", "4"]
    assert [label.get_text() for label in few.get_yticklabels()] == ["a" * 21 + "...", "$b$"]
    many = plot_confusion(torch.eye(100, dtype=torch.int64), [f"class{i}" for i in range(100)]).axes[0]
    assert not many.texts and "class1" not in [label.get_text() for label in many.get_yticklabels()]


def test_what_cannot_be_evaluated_is_refused_with_one_message(finished: Finished, copy: Path, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    shutil.copytree(finished.images / "test", unknown)
    (unknown / "red").rename(unknown / "white")
    refused(call("evaluate", str(finished.run), "--data-dir", str(unknown)), 3, f"{unknown / 'white'} is none of the")
    refused(call("evaluate", str(finished.run), "--data-dir", str(tmp_path / "no")), 3, "no does not exist")
    refused(call("evaluate", str(finished.run), "--batch-size", "-1"), 2, "--batch-size (-1)")
    (tmp_path / "file").write_text("")
    outcome = call("evaluate", str(finished.run), "--out", str(tmp_path / "file"))
    assert outcome.returncode == 3 and "choose another --out" in outcome.messages[0], str(outcome)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    for section, entry, message in (
        ("data", {"data_dir": str(tmp_path / "moved")}, "moved does not exist"),
        ("data", {"image_size": 24}, "has changed: it has 3 classes of images of 24x24 pixels"),
        ("data", {"image_size": "many"}, "is damaged or of another version"),
    ):
        changed = {**config, section: {**config[section], **entry}}
        (copy / "config.yaml").write_text(yaml.safe_dump(changed))
        refused(call("evaluate", str(copy)), 3, message)


def test_each_of_several_models_is_applied_by_its_name(finished: Finished, tmp_path: Path) -> None:
    run, image = tmp_path / "several", str(finished.images / "test" / "red" / "00.png")
    flags = ["--model", "shufflenet_v2_x0_5", "--data", "imagefolder", "--data-dir", str(finished.images)]
    flags += ["--image-size", "48", "--batch-size", "8", "--epochs", "1", "--threads", "1", "--quiet"]
    flags += ["--strategy", "shared-trunk"]
    assert call("train", *flags, "--heads", "2", "--run-dir", str(run)).returncode == 0
    summary = json.loads((run / "summary.json").read_text())
    answers = set()
    for name in ("model-head0", "model-head1"):
        outcome = call("evaluate", str(run), "--model-name", name)
        accuracy = summary["models"][name]["test_accuracy"]
        assert f"top-1 {100 * accuracy:.2f} %" in outcome.stdout and "as the run reported" in outcome.stdout
        answers.add(call("predict", str(run), image, "--model-name", name).stdout)
    assert len(answers) == 2 and all(text.startswith("path,class,probability") for text in answers)
    for command in (["evaluate", str(run)], ["predict", str(run), image, "--model-name", "model-none"]):
        outcome = call(*command)
        assert outcome.returncode == 3 and "--model-name model-head0" in outcome.stderr, str(outcome)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["strategy"] |= {"heads": None, "tasks": "labels.csv"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = call("evaluate", str(run), "--model-name", "model-head0")
    assert outcome.returncode == 3 and "labels from a table (labels.csv)" in outcome.stderr, str(outcome)
