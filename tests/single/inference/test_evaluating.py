"""`hvfreeze evaluate`: the run's own accuracy and loss again, every class, and the table of confusions."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import hvfreeze
from hvfreeze.errors import RefusedError
from hvfreeze.inference.evaluate import (
    EvaluatedSamples,
    Result,
    describe,
    judge,
    measure,
    own_samples,
    plot_confusion,
    samples_in,
)
from hvfreeze.inference.exits import Answering
from tests.program import call, save_photos
from tests.single.data.test_cifar import CLASSES as CIFAR_CLASSES
from tests.single.data.test_cifar import write_cifar10
from tests.single.inference.conftest import CLASSES, Finished, train
from tests.single.refusing import refused


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
    assert outcome.stdout.splitlines()[-2].startswith("mean confidence") and found["expected_calibration_error"] < 1
    with (out / "reliability.csv").open() as file:
        bins = list(csv.DictReader(file))
    assert len(bins) == 15 and sum(int(row["samples"]) for row in bins) == 21
    right = sum(int(row["samples"]) * float(row["accuracy"] or 0) for row in bins)
    assert right == pytest.approx(found["correct"])
    assert (out / "reliability.png").stat().st_size > 5000 and "<svg" in (out / "reliability.svg").read_text()
    assert (out / "confusion.png").stat().st_size > 5000 and "<svg" in (out / "confusion.svg").read_text()


def test_images_of_a_folder_are_evaluated_wherever_their_classes_lie(finished: Finished, tmp_path: Path) -> None:
    applied = hvfreeze.load_model(finished.run)
    own = measure(Answering(applied), own_samples(applied, finished.run))
    for folder in (finished.images, finished.images / "test"):
        again = measure(Answering(applied), samples_in(applied, folder))
        assert again.rows == own.rows and again.loss == own.loss and np.array_equal(again.confusion, own.confusion)
    shutil.copytree(finished.images / "test" / "red", tmp_path / "Valid" / "red")
    (tmp_path / "Valid" / "blue").mkdir()
    outcome = call("evaluate", str(finished.run), "--data-dir", str(tmp_path))
    assert outcome.returncode == 0 and f"on 7 images of {tmp_path / 'Valid'}: top-1" in outcome.stdout, str(outcome)
    assert "run reported" not in outcome.stdout and "blue" not in outcome.stdout


def test_bad_images_are_all_named_and_can_be_left_out(finished: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "test"
    shutil.copytree(finished.images / "test", folder)
    bad = [folder / part for part in ("blue/00.png", "blue/06.png", "red/03.png")]
    for path in bad:
        path.write_bytes(path.read_bytes()[:80])
    evaluated = ("evaluate", str(finished.run), "--data-dir", str(folder))
    refused = call(*evaluated)
    assert refused.returncode == 3 and len(refused.messages) == 1, str(refused)
    assert all(str(path) in refused.messages[0] for path in bad), str(refused)
    # The others have their result all the same.
    assert f"on 18 images of {folder}: top-1" in refused.stdout and "3 images left out" in refused.stdout, str(refused)
    skipped = call(*evaluated, "--skip-bad")
    assert skipped.returncode == 0 and "3 images left out as unreadable" in skipped.stdout, str(skipped)
    for path in bad:
        path.unlink()
    whole = call(*evaluated)
    for outcome in (refused, skipped):
        assert [line for line in outcome.stdout.splitlines() if not line.startswith("note")] == (
            whole.stdout.splitlines()
        )
    none = tmp_path / "none" / "red"
    none.mkdir(parents=True)
    (none / "0.png").write_bytes(b"no image")
    for flags in ([], ["--skip-bad"]):
        refused = call("evaluate", str(finished.run), "--data-dir", str(none.parent), *flags)
        assert refused.returncode == 3 and "top-1" not in refused.stdout, str(refused)
        assert str(none / "0.png") in refused.messages[0]


def test_held_out_samples_are_evaluated_where_the_run_was(tmp_path: Path) -> None:
    flags = "--model mlp-16x16 --train-samples 60 --validation-fraction 0.4 --quiet --batch-size 16 --epochs 1"
    run = tmp_path / "run"
    frozen = "--threads 1 --lr 0.01 --freeze static --cut 2"
    assert call("train", *flags.split(), *frozen.split(), "--run-dir", str(run)).returncode == 0
    outcome = call("evaluate", str(run))
    assert "held-out samples of the run's data: top-1" in outcome.stdout and "top-5" in outcome.stdout, str(outcome)
    assert "as the run reported" in outcome.stdout
    line = json.loads((run / "metrics.jsonl").read_text())
    applied = hvfreeze.load_model(run)
    assert measure(Answering(applied), own_samples(applied, run)).loss == pytest.approx(line["test_loss"], rel=1e-12)


def judged(labels: torch.Tensor, answered: torch.Tensor, classes: tuple[str, ...]) -> Result:
    """The result of a model that is sure of these classes."""
    return judge(labels, 9.0 * torch.eye(len(classes))[answered], classes, sizes=[len(labels)])


def samples_of(labels: torch.Tensor, *, own: bool) -> EvaluatedSamples:
    return EvaluatedSamples(lambda row: np.zeros((3, 4, 4), np.uint8), labels, "samples", own=own)


def test_counts_are_by_true_class_and_answer(finished: Finished) -> None:
    labels, answered = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 1, 1, 1])
    applied = hvfreeze.load_model(finished.run)
    result = judged(labels, answered, applied.classes)
    assert result.confusion.tolist() == [[2, 1, 0], [0, 3, 0], [0, 0, 0]]
    columns = ("samples", "answered", "correct", "recall", "precision")
    assert [tuple(row[name] for name in columns) for row in result.rows] == [
        (3, 2, 2, 2 / 3, 1.0),
        (3, 4, 3, 1.0, 0.75),
        (0, 0, 0, None, None),
    ]
    assert (result.count, result.correct, result.accuracy, result.among_best) == (6, 5, 5 / 6, 6)
    told = describe(applied, samples_of(labels, own=True), result)
    assert "the run reported" in told and len(told.splitlines()) == 7
    odd = replace(applied, classes=("a\nb", "\x1b[0m", "c"))
    told = describe(odd, samples_of(labels, own=False), judged(labels, answered, odd.classes))
    assert [line.split()[:2] for line in told.splitlines()[2:4]] == [["a\\nb", "3"], ["\\x1b[0m", "3"]]


def test_a_figure_of_many_classes_names_none_and_of_few_tells_counts() -> None:
    few = plot_confusion(np.array([[3, 1], [0, 4]]), ["a" * 40, "$b$"]).axes[0]
    assert [text.get_text() for text in few.texts] == ["3", "1", "", "4"]
    assert [label.get_text() for label in few.get_yticklabels()] == ["a" * 21 + "...", "$b$"]
    many = plot_confusion(np.eye(100, dtype=np.int64), [f"class{i}" for i in range(100)]).axes[0]
    assert not many.texts and "class1" not in [label.get_text() for label in many.get_yticklabels()]


def test_samples_of_an_archive_have_the_labels_of_classes_that_the_model_was_trained_on(
    finished: Finished, tmp_path: Path
) -> None:
    """It may have been trained on folders of such images, with some of the classes or names of its own."""
    write_cifar10(tmp_path)
    applied = hvfreeze.load_model(finished.run)
    of_folders = replace(applied, card=replace(applied.card, data="cifar10"), classes=tuple(reversed(CIFAR_CLASSES)))
    names = [of_folders.classes[label] for label in samples_in(of_folders, tmp_path).labels]
    assert names == [CIFAR_CLASSES[row % 10] for row in range(20, 24)]
    with pytest.raises(RefusedError, match=f"class {CIFAR_CLASSES[0]} of .* is not one of the model's 2 classes"):
        samples_in(replace(of_folders, classes=tuple(CIFAR_CLASSES[3:5])), tmp_path)


def test_what_cannot_be_evaluated_is_refused_with_one_message(finished: Finished, copy: Path, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    shutil.copytree(finished.images / "test", unknown)
    (unknown / "red").rename(unknown / "white")
    refused(call("evaluate", str(finished.run), "--data-dir", str(unknown)), 3, f"{unknown / 'white'} is not one of")
    refused(call("evaluate", str(finished.run), "--data-dir", str(tmp_path / "no")), 3, "no does not exist")
    file = finished.images / "test" / "red" / "00.png"
    refused(call("evaluate", str(finished.run), "--data-dir", str(file)), 3, f"data folder {file} is not a folder")
    refused(call("evaluate", str(finished.run), "--batch-size", "-1"), 2, "--batch-size (-1)")
    refused(
        call("evaluate", str(finished.run), "--model-name", "other"),
        3,
        "no other.pt, but model; choose one with --model-name",
    )
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


def test_a_model_with_an_mlp_for_a_head_is_applied(finished: Finished, tmp_path: Path) -> None:
    run, image = tmp_path / "mlp", str(finished.images / "test" / "red" / "00.png")
    summary = train(
        finished.images, run, "--model resnet20 --image-size 8 --epochs 1 --head mlp-12 --freeze static --cut 2"
    )
    outcome = call("evaluate", str(run))
    assert f"top-1 {100 * summary['test_accuracy']:.2f} %" in outcome.stdout, str(outcome)
    assert "as the run reported" in outcome.stdout
    assert yaml.safe_load((run / "model.yaml").read_text())["head"] == "mlp-12"
    assert call("predict", str(run), image).stdout.startswith("path,class,probability")


def test_each_of_several_models_is_applied_by_its_name(finished: Finished, tmp_path: Path) -> None:
    run, image = tmp_path / "several", str(finished.images / "test" / "red" / "00.png")
    summary = train(
        finished.images, run, "--model mlp-16x16 --image-size 8 --epochs 2 --strategy shared-trunk --heads 2"
    )
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
    assert outcome.returncode == 3 and "come from a table (labels.csv)" in outcome.stderr, str(outcome)


def test_a_copy_whose_names_are_encoded_otherwise_is_the_runs_data(tmp_path: Path) -> None:
    composed, decomposed = "\u00e9t\u00e9", "e\u0301te\u0301"
    folder, run = save_photos(tmp_path / "photos"), tmp_path / "run"
    for part in ("train", "test"):
        (folder / part / "a").rename(folder / part / composed)
        (folder / part / "b").rename(folder / part / "z")
    flags = "--model mlp-8 --image-size 8 --data imagefolder --batch-size 8 --epochs 1 --threads 1"
    outcome = call("train", *flags.split(), "--data-dir", str(folder), "--run-dir", str(run))
    assert outcome.returncode == 0, str(outcome)
    for part in ("train", "test"):
        (folder / part / composed).rename(folder / part / decomposed)
    assert hvfreeze.load_model(run).classes == ("z", composed), "which is another order than that of the folders now"
    assert "as the run reported" in call("evaluate", str(run)).stdout
