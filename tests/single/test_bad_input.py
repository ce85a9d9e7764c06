"""Whatever a user gets wrong ends the program with one message that names it, and changes nothing on disk."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.program import Outcome, call
from tests.single.refusing import SMALL, refused

PROBE = "code-was-run"


class Evil:
    """An object that leaves a file behind when it is unpickled by a reader that runs code."""

    def __init__(self, probe: Path) -> None:
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.probe,)


SHORT = SMALL[: SMALL.index("--epochs")]
# tests/single/config/test_command_lines.py has values out of bounds of every flag.
USAGE = [
    ("--epoch 2", ["unknown argument '--epoch'", "did you mean '--epochs'?"]),
    ("--epochs=2 digits", ["unknown argument 'digits'; name data with --data"]),
    ("--epochs", ["--epochs needs a value; see 'hvfreeze train --help'"]),
    ("--epochs many", ["--epochs (many) must be a whole number"]),
    ("--epochs 0", ["--epochs (0)", "at least 1"]),
    ("--lr fast", ["--lr (fast) must be a number"]),
    ("--momentum 1", ["--momentum (1.0) must be at least 0 and below 1"]),
    ("--data-dir=", ["--data-dir ('')", "not empty"]),
    ("--train-samples 5", ["--train-samples (5)", "at least 10"]),
    ("--train-samples 5000000", ["--train-samples (5000000)", "at most"]),
    ("--batch-size 1 --image-size 16", ["--batch-size (1)", "2 samples", "16x16", "BatchNorm", "--image-size"]),
    ("--batch-size 1 --image-size 16 --time-budget 1h", ["--batch-size (1)", "BatchNorm"]),
    ("--strategy grid --micro-batches 9 --image-size 16", ["--micro-batches (9) of --batch-size (16)", "BatchNorm"]),
    ("--strategy shared-trunk --head-blocks 2 --batch-size 1 --image-size 16", ["--batch-size (1)", "BatchNorm"]),
    ("--shard-sizes 1,1", ["--shard-sizes (1,1)", "1 number, one for each shard", "shared-trunk"]),
    ("--model resnet19", ["resnet19", "did you mean", "resnet18"]),
    ("--model ../../resnet18", ["../../resnet18"]),
    ("--model alexnet", ["model (AlexNet) fails on images of 32x32", "--image-size 63 or more"]),
    ("--model vit_b_16 --image-size 40", ["image size (40)", "multiple of 16"]),
    ("--blocks conv1,nowhere", ["nowhere"]),
    ("--freeze static --cut 6", ["cut (6)", "0..2"]),
    ("--freeze linear --vote-weight 1,2", ["--vote-weight (1,2)", "1"]),
    ("--vote-weight 0,0", ["--vote-weight (0,0)", "not all 0"]),
    ("--strategy subnets --model mlp-16 --statistics kept", ["--statistics (kept)", "subnets"]),
]


AUTO_USAGE = [
    ("--cut 6", ["cut (6)", "0..2"]),
    ("--cut 50 --time-budget 60s", ["--cut (50)", "0..2"]),
    ("--head-fit sgd --head last", ["--head-fit (sgd)", "exact"]),
    ("--auto-without tuning", ["--auto-without (tuning)", "votes"]),
]


@pytest.mark.parametrize(("arguments", "fragments"), AUTO_USAGE, ids=[arguments for arguments, _ in AUTO_USAGE])
def test_an_argument_of_auto_that_makes_no_sense_is_named(run_dir: Path, arguments: str, fragments: list[str]) -> None:
    refused(call("auto", "digits", *SHORT, "--run-dir", str(run_dir), *arguments.split()), 2, *fragments)


@pytest.mark.parametrize(("arguments", "fragments"), USAGE, ids=[arguments for arguments, _ in USAGE])
def test_an_argument_that_makes_no_sense_is_named_with_its_value(
    run_dir: Path, arguments: str, fragments: list[str]
) -> None:
    refused(call("train", *SHORT, "--run-dir", str(run_dir), *arguments.split()), 2, *fragments)


def test_a_time_that_set_up_alone_has_spent_is_named_with_the_one_that_is_needed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine may be fast enough for every whole second that could be given.
    monkeypatch.setattr("hvfreeze.training.budget.Budget.elapsed", lambda budget: 60.0)
    given = ["--run-dir", str(run_dir), "--time-budget", "20s"]
    refused(call("train", *SHORT, *given), 2, "--time-budget (20s)", "at least about")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["trian"], ["unknown command 'trian'", "did you mean 'train'?"]),
        ([], ["COMMAND"]),
        (["report"], ["missing: RUN_DIR, --out"]),
        (["cache", "burn", "."], ["(burn) must be one of", "verify"]),
        (["predict", "run", "image.png", "--top", "two"], ["--top (two) must be a whole number"]),
        (["blocks", "--model", "resnet18"], ["unknown argument '--model'; write hvfreeze blocks MODEL"]),
        (["evaluate", "--run-dir", "run"], ["unknown argument '--run-dir'; write hvfreeze evaluate RUN"]),
        (["evaluate", "run", "--batchsize", "3"], ["did you mean '--batch-size'?"]),
        (["doctor", "--data-dir", "photos"], ["--data-dir (photos)", "--hosts"]),
        # As a shell gives for a variable that is not set.
        (["cache", "rm", ""], ["the path is empty"]),
        (["evaluate", "run", "--data-dir", ""], ["--data-dir", "the path is empty"]),
        (["report", "run", "--out", ""], ["--out", "the path is empty"]),
    ],
)
def test_an_unknown_command_is_refused(arguments: list[str], fragments: list[str]) -> None:
    refused(call(*arguments), 2, *fragments)


FILES = [
    ("epochz: 3", ["unknown key 'epochz'", "did you mean 'epochs'?"]),
    ("optimizer: {epochz: 3}", ["unknown key 'epochz'", "did you mean 'epochs'?"]),
    ("model: {epochs: 3}", ["epochs"]),
    ("epochs: many", ["epochs ('many') must be a whole number"]),
    ("epochs: yes", ["epochs (True) must be a whole number"]),
    ("resume: 1", ["resume (1) must be true or false"]),
    ("lr: .nan", ["--lr (nan)"]),
    ("vote_weight: [1, -2]", ["--vote-weight (1,-2)", "negative"]),
    ("- epochs", ["must be a mapping", "list"]),
    ("epochs: [", ["is not plain YAML: line 1: expected a value, but found the end of the file"]),
    ("lr: 0.1\nhead: {pool: 2\nepochs: 3", ["is not plain YAML: line 2: expected ',' or '}'"]),
    (f"run_dir: !!python/object/apply:os.mkdir [{PROBE}]", ["is not plain YAML", "python/object"]),
]


@pytest.mark.parametrize(("text", "fragments"), FILES, ids=[text for text, _ in FILES])
def test_a_configuration_file_that_makes_no_sense_is_refused(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fragments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    refused(call("train", "--run-dir", str(run_dir), "--config", str(file)), 2, *fragments)
    assert not (tmp_path / PROBE).exists()


def test_a_configuration_file_that_cannot_be_read_is_refused(run_dir: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00epochs")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        refused(call("train", "--run-dir", str(run_dir), "--config", str(path)), 2, "--config", str(path))


def test_weights_that_do_not_fit_are_refused(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"

    def outcome() -> Outcome:
        return call("train", *SMALL, "--run-dir", str(run_dir), "--weights", str(file))

    refused(outcome(), 3, str(file), "No such file")
    torch.save(torch.nn.Linear(3, 2).state_dict(), file)
    refused(outcome(), 3, str(file), "Mlp", "missing", "choose the --model that")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(outcome(), 3, str(file), "damaged")
    file.write_bytes(b"")
    refused(outcome(), 3, str(file), "damaged")
    torch.save([1, 2], file)
    refused(outcome(), 3, str(file), "state_dict")


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_weights_that_want_to_run_code_are_refused_and_do_not_run(run_dir: Path, tmp_path: Path, write: Any) -> None:
    file, probe = tmp_path / "weights.pt", tmp_path / PROBE
    write({"fc.weight": Evil(probe)}, file)
    refused(call("train", *SMALL, "--run-dir", str(run_dir), "--weights", str(file)), 3, str(file), "code")
    assert not probe.exists()
    pickle.loads(pickle.dumps(Evil(probe)))
    assert probe.exists(), "the object is harmless, this test proves nothing"
