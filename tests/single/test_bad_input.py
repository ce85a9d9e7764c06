"""Whatever a user gets wrong ends the program with one message that names it, and changes nothing on disk."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.program import Outcome, call, contents, spawn, without_privileges
from tests.single.refusing import SMALL, refused

PROBE = "code-was-run"


class Evil:
    """An object that leaves a file behind when it is unpickled by a reader that runs code."""

    def __init__(self, probe: Path) -> None:
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.probe,)


USAGE = [
    ("--epoch 2", ["unknown argument '--epoch'", "did you mean '--epochs'?"]),
    ("--epochs=2 digits", ["unknown argument 'digits'"]),
    ("--epochs", ["--epochs", "expected one argument"]),
    ("--epochs many", ["--epochs", "invalid int value: 'many'"]),
    ("--epochs 2.5", ["--epochs", "invalid int value: '2.5'"]),
    ("--epochs 0", ["--epochs (0)", "at least 1"]),
    ("--lr fast", ["--lr", "invalid float value: 'fast'"]),
    ("--lr nan", ["--lr (nan)", "positive"]),
    ("--lr inf", ["--lr (inf)", "positive"]),
    ("--momentum 1", ["--momentum (1.0)", "[0, 1)"]),
    ("--weight-decay nan", ["--weight-decay (nan)"]),
    ("--schedule linear", ["--schedule (linear)", "constant, step, cosine"]),
    ("--precision float16", ["--precision (float16)", "float32, bfloat16"]),
    ("--threads 0", ["--threads (0)", "at least 1"]),
    ("--seed -1", ["--seed (-1)"]),
    ("--checkpoint-every often", ["--checkpoint-every (often)"]),
    ("--data mnist", ["--data (mnist)", "digits, cifar10, cifar100, imagefolder"]),
    ("--data imagefolder", ["--data (imagefolder)", "--data-dir"]),
    ("--train-samples 5", ["--train-samples (5)", "at least 10"]),
    ("--train-samples 5000000", ["--train-samples (5000000)", "at most"]),
    ("--validation-fraction 1", ["--validation-fraction (1.0)", "[0, 1)"]),
    ("--batch-size 4096", ["--batch-size (4096)", "smallest shard", "96"]),
    ("--augment views:0", ["--augment (views:0)", "views:K"]),
    ("--shuffle never", ["--shuffle (never)", "shard, global"]),
    ("--partition dirichlet:nan", ["--partition (dirichlet:nan)"]),
    ("--shard-sizes 1,nan", ["--shard-sizes (1,nan)"]),
    ("--shard-sizes 1,1", ["--shard-sizes (1,1)", "1 ranks"]),
    ("--image-size 0", ["--image-size (0)"]),
    ("--model resnet19", ["resnet19", "did you mean", "resnet18"]),
    ("--model ../../resnet18", ["../../resnet18"]),
    ("--model alexnet", ["image size (32)", "alexnet", "63"]),
    ("--model vit_b_16 --image-size 40", ["image size (40)", "multiple of 16"]),
    ("--blocks conv1,nowhere", ["nowhere"]),
    ("--freeze often", ["--freeze (often)", "gradient-norm"]),
    ("--freeze static", ["--freeze (static)", "--cut"]),
    ("--cut 2", ["--cut (2)", "--freeze", "static"]),
    ("--freeze linear --cut 2", ["--cut (2)", "static"]),
    ("--freeze static --cut -1", ["--cut (-1)"]),
    ("--freeze auto --cut 6", ["cut (6)", "0..5"]),
    ("--freeze auto --head-fit sgd --head last", ["--head-fit (sgd)", "exact"]),
    ("--freeze auto --auto-without tuning", ["--auto-without (tuning)", "votes"]),
    ("--freeze auto --early-stop 2 --validation-fraction 0.2", ["--early-stop (2)", "auto"]),
    ("--time-budget soon", ["--time-budget (soon)", "90s"]),
    ("--time-budget 0s", ["--time-budget (0s)"]),
    ("--freeze static --cut 6", ["cut (6)", "0..5"]),
    ("--interval 0", ["--interval (0)"]),
    ("--quorum 0", ["--quorum (0.0)", "(0, 1]"]),
    ("--quorum nan", ["--quorum (nan)", "(0, 1]"]),
    ("--eta-max nan", ["--eta-max (nan)"]),
    ("--vote-weight loudest", ["--vote-weight (loudest)", "uniform"]),
    ("--freeze linear --vote-weight 1,2", ["--vote-weight (1,2)", "1"]),
    ("--vote-weight 1,nan", ["--vote-weight (1,nan)"]),
    ("--vote-weight=-1,2", ["--vote-weight (-1,2)", "negative"]),
    ("--vote-weight 0,0", ["--vote-weight (0,0)", "not all 0"]),
    ("--shadow linear,sometimes", ["--shadow (sometimes)", "percentile"]),
    ("--cache on", ["--cache (on)", "--augment", "views:K"]),
    ("--cache on --augment none --shuffle global", ["--shuffle (global)", "--cache-shared"]),
    ("--cache-limit plenty", ["--cache-limit (plenty)"]),
    ("--cache-dtype int8", ["--cache-dtype (int8)", "native"]),
]


@pytest.mark.parametrize(("arguments", "fragments"), USAGE, ids=[arguments for arguments, _ in USAGE])
def test_an_argument_that_makes_no_sense_is_named_with_its_value(
    run_dir: Path, arguments: str, fragments: list[str]
) -> None:
    refused(call("train", *SMALL, "--run-dir", str(run_dir), *arguments.split()), 2, *fragments)


def test_a_time_that_set_up_alone_has_spent_is_named_with_the_one_that_is_needed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine may be fast enough for every whole second that could be given.
    monkeypatch.setattr("hvfreeze.training.stages.budget.TimeBudget.elapsed", lambda budget: 60.0)
    given = ["--run-dir", str(run_dir), "--time-budget", "20s"]
    refused(call("train", *SMALL, *given), 2, "--time-budget (20s)", "at least about")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["trian"], ["unknown command 'trian'", "did you mean 'train'?"]),
        ([], ["COMMAND"]),
        (["report"], ["RUN_DIR"]),
        (["cache", "burn", "."], ["burn", "verify"]),
    ],
)
def test_an_unknown_command_is_refused(arguments: list[str], fragments: list[str]) -> None:
    refused(call(*arguments), 2, *fragments)


FILES = [
    ("epochz: 3", ["unknown key 'epochz'", "did you mean 'epochs'?"]),
    ("optimizer: {epochz: 3}", ["unknown key 'epochz'", "did you mean 'epochs'?"]),
    ("model: {epochs: 3}", ["epochs"]),
    ("optimiser: {epochs: 3}", ["optimiser", "optimizer"]),
    ("epochs: many", ["epochs ('many')", "int"]),
    ("epochs: 2.5", ["epochs (2.5)", "int"]),
    ("epochs: yes", ["epochs (True)", "int"]),
    ("resume: 1", ["resume (1)", "bool"]),
    ("lr: .nan", ["--lr (nan)"]),
    ("vote_weight: [1, .nan]", ["--vote-weight (1,nan)"]),
    ("vote_weight: [1, -2]", ["--vote-weight (1,-2)", "negative"]),
    ("- epochs", ["must be a mapping", "list"]),
    ("epochs: [", ["not plain YAML"]),
    ("epochs: \x07", ["not plain YAML"]),
    (f"run_dir: !!python/object/apply:os.mkdir [{PROBE}]", ["not plain YAML", "python/object"]),
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
    refused(outcome(), 3, str(file), "ShuffleNetV2", "missing", "another model")
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    outcome = call("train", *SMALL, "--run-dir", str(folder))
    assert outcome.returncode == 0, str(outcome)
    return folder


def test_a_directory_that_holds_another_run_is_left_alone(finished: Path) -> None:
    before = contents(finished)
    refused(call("train", *SMALL, "--run-dir", str(finished)), 2, "--run-dir", str(finished), "--resume")
    again = ["train", *SMALL, "--run-dir", str(finished), "--resume"]
    refused(call(*again, "--lr", "0.5"), 3, str(finished), "lr: 0.1 there, 0.5 here")
    refused(call(*again, "--seed", "1", "--epochs", "3"), 3, "seed: 0 there, 1 here")
    assert contents(finished) == before


@pytest.mark.parametrize("text", [b"", b"[1, 2]", b"optimizer: 3", b"optimizer: {lr: [", b"\xff\xfe\x00"])
def test_a_run_whose_configuration_is_damaged_is_not_resumed(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    refused(call("train", *SMALL, "--run-dir", str(tmp_path), "--resume"), 3, "config.yaml", "damaged")
    assert contents(tmp_path) == {"config.yaml": text}


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "run"):
        refused(call("train", *SMALL, "--run-dir", str(path)), 2, "--run-dir", str(path), "choose another")
    assert file.read_text() == "mine"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with without_privileges():
        refused(call("train", *SMALL, "--run-dir", str(closed)), 2, str(closed), "Permission denied")
        refused(call("train", *SMALL, "--run-dir", str(closed / "run")), 2, str(closed), "Permission denied")
    assert not contents(closed)


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        refused(call("train", *SMALL, "--run-dir", str(tmp_path / "run")), 2, "--run-dir", "Read-only file system")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_each_kind_of_refusal_is_the_exit_code_of_the_process(finished: Path, run_dir: Path, tmp_path: Path) -> None:
    before = contents(finished)
    refused(spawn("train", "--epoch", "2", "--run-dir", str(run_dir)), 2, "'--epoch'", "'--epochs'")
    refused(spawn("train", *SMALL, "--lr", "0.2", "--run-dir", str(finished), "--resume"), 3, "lr: 0.1 there, 0.2 here")
    assert contents(finished) == before


def test_a_run_keeps_its_files_to_its_owner_and_no_secret_in_them(tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", "hunter2-5f1d"
    outcome = spawn("train", *SMALL, "--run-dir", str(folder), env={"FAKE_API_KEY": secret})
    assert outcome.returncode == 0, str(outcome)
    modes = {str(path.relative_to(tmp_path)): oct(path.stat().st_mode & 0o777) for path in [folder, *folder.rglob("*")]}
    wanted = {name: oct(0o700 if (tmp_path / name).is_dir() else 0o600) for name in modes}
    assert modes == wanted
    names = {"config.yaml", "environment.json", "metrics.jsonl", "decisions.jsonl", "summary.json", "checkpoints"}
    assert names <= {os.path.basename(name) for name in modes}
    for path, content in contents(folder).items():
        assert secret.encode() not in (content or b""), path
        assert b"FAKE_API_KEY" not in (content or b""), path
    assert secret not in outcome.stdout + outcome.stderr
