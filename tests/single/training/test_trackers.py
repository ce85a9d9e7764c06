"""--track: a run's settings, numbers, votes, summary and figures in trackers, which never end a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.config.tree import from_dict
from hvfreeze.inference import run_figures
from hvfreeze.runs import trackers
from tests.program import call, digest_of, succeed, summary_of

FLAGS = ("--model", "mlp-16x16", "--train-samples", "32", "--batch-size", "16", "--threads", "1")


class Remembers:
    """A tracker that remembers what it was told."""

    made: list[Remembers] = []  # noqa: RUF012

    def __init__(self, directory: Path, settings: Mapping[str, str], *, identity: str, step: int) -> None:
        self.identity, self.step, self.settings = identity or "mine", step, settings
        self.told: dict[tuple[str, int], float] = {}
        self.texts: list[str] = []
        self.files: list[str] = []
        self.summary: dict[str, float] = {}
        self.closed: bool | None = None
        self.made.append(self)

    def numbers(self, numbers: Mapping[str, float], *, step: int) -> None:
        self.told |= {(name, step): value for name, value in numbers.items()}

    def text(self, name: str, text: str, *, step: int) -> None:
        self.texts.append(f"{name}: {text}")

    def finish(self, summary: Mapping[str, float], files: Sequence[Path]) -> None:
        self.summary, self.files = dict(summary), [path.name for path in files]

    def close(self, *, failed: bool) -> None:
        self.closed = failed


class FailsAtOnce(Remembers):
    def __init__(self, *given: Any, **named: Any) -> None:
        raise ConnectionError("no server\nanswers")


class FailsLater(Remembers):
    def numbers(self, numbers: Mapping[str, float], *, step: int) -> None:
        raise SystemExit(1)


class Hangs(Remembers):
    def numbers(self, numbers: Mapping[str, float], *, step: int) -> None:
        time.sleep(60)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(**kinds: Any) -> None:
        monkeypatch.setattr(trackers, "find_spec", lambda name: name)
        monkeypatch.setattr(Remembers, "made", [])
        for name, kind in kinds.items():
            monkeypatch.setitem(trackers.KINDS, name, kind)

    return use


def test_a_tracker_is_told_of_the_whole_run_and_goes_on_with_it(
    use: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mlflow=Remembers)
    flags = (*FLAGS, "--track", "mlflow", "--schedule", "cosine", "--freeze", "linear", "--run-dir", str(tmp_path))
    made = succeed("train", *flags, "--epochs", "2", "--interval", "1")
    assert "warning" not in made.stdout, str(made)
    (one,) = Remembers.made
    assert one.step == 0 and one.closed is False
    assert one.settings["optimizer.epochs"] == "2" and one.settings["data.data"] == "digits"
    names = {name for name, _ in one.told}
    assert {
        "train_loss",
        "test_accuracy",
        "cut",
        "learning_rate",
        "seconds/backward",
        "cache/bytes",
        "vote/cut",
    } <= names
    assert {step for name, step in one.told if name == "test_accuracy"} == {2, 4}
    votes = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert len(one.texts) == len(votes) and all(text.startswith("vote: cut ") for text in one.texts)
    summary = summary_of(tmp_path)
    assert one.summary["test_accuracy"] == summary["test_accuracy"]
    assert {"config.yaml", "metrics.jsonl", "decisions.jsonl", "accuracy.png", "phases.png", "cuts.png"} <= {*one.files}
    monkeypatch.setattr(run_figures, "files_for_trackers", lambda directory: [])
    succeed("train", *flags, "--epochs", "3", "--interval", "1", "--resume")
    again = Remembers.made[1]
    assert again.identity == "mine" and again.step == 4
    assert {step for name, step in again.told if name == "test_accuracy"} == {6}


@pytest.mark.seldom
def test_what_auto_does_is_told_by_verb(use: Callable[..., None], tmp_path: Path) -> None:
    use(mlflow=Remembers)
    flags = ("--model", "mlp-16x16", "--train-samples", "64", "--epochs", "1", "--threads", "1")
    succeed("auto", "digits", *flags, "--track", "mlflow", "--run-dir", str(tmp_path))
    assert {"solve/held_out_loss", "finish/test_accuracy"} <= {name for name, _ in Remembers.made[0].told}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without a tracker."""
    run = tmp_path_factory.mktemp("plain") / "run"
    succeed("train", *FLAGS, "--epochs", "1", "--run-dir", str(run))
    return digest_of(run)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (FailsAtOnce, "ConnectionError: no server answers"),
        (FailsLater, "SystemExit: 1"),
        (Hangs, "it did not end within"),
    ],
)
def test_a_tracker_that_fails_changes_nothing_of_the_run(
    kind: Any, why: str, plain: str, use: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_END", 0.5)
    monkeypatch.setattr(run_figures, "files_for_trackers", lambda directory: [])
    use(mlflow=kind, wandb=Remembers)
    flags = ["--track", "mlflow,wandb", "--run-dir", str(tmp_path), "--json"]
    tracked = succeed("train", *FLAGS, "--epochs", "1", *flags)
    [line] = [line for line in tracked.stdout.splitlines() if "warning: " in line]
    assert f"tracking with mlflow is incomplete: {why}" in line
    assert Remembers.made[-1].closed is False, "the other tracker is told all the same"
    assert digest_of(tmp_path) == plain


def test_a_run_that_fails_is_ended_as_failed(use: Callable[..., None], tmp_path: Path) -> None:
    use(mlflow=Remembers)
    made = call("train", *FLAGS, "--lr", "1e30", "--epochs", "3", "--track", "mlflow", "--run-dir", str(tmp_path))
    assert made.returncode == 5, str(made)
    assert Remembers.made[0].closed is True


def test_without_the_library_nothing_is_begun_and_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in trackers.KINDS:
        outcome = call("train", *FLAGS, "--track", name, "--run-dir", str(tmp_path / "run"))
        assert outcome.returncode == 2 and f"pip install {name}" in outcome.stderr, str(outcome)
    assert not (tmp_path / "run").exists()
    outcome = call("train", *FLAGS, "--track", "neptune", "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2 and "--track (neptune) must be none or a list out of tensorboard" in outcome.stderr


def test_the_flag_of_earlier_files_is_read() -> None:
    assert from_dict({"run": {"tensorboard": True}}).run.track == "tensorboard"
    assert from_dict({"tensorboard": False}).run.track == "none"


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a run with a tracker that is installed, without a network."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str) -> Path:
        flags = (*FLAGS, "--track", name, "--run-dir", str(tmp_path / "runs" / "one"))
        for epochs, more in (("1", ()), ("2", ("--resume",))):
            made = succeed("train", *flags, "--epochs", epochs, *more)
            assert "warning" not in made.stdout, str(made)
        return tmp_path / "runs"

    return run


WARNS = pytest.mark.filterwarnings("default")


@WARNS
def test_tensorboard_reads_what_was_written(real: Callable[[str], Path]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    events = EventAccumulator(str(real("tensorboard") / "one" / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"train_loss", "learning_rate"} <= {*tags["scalars"]} and {"accuracy", "phases"} <= {*tags["images"]}
    assert {"settings/text_summary", "summary/text_summary"} <= {*tags["tensors"]}
    assert [event.step for event in events.Scalars("test_accuracy")] == [2, 4]


@WARNS
def test_mlflow_finds_the_run_in_its_local_store(real: Callable[[str], Path]) -> None:
    mlflow = pytest.importorskip("mlflow")
    runs = real("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("hvfreeze").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "one" and run.data.params["run.seed"] == "0"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "test_accuracy")] == [2, 4]
    summary = summary_of(runs / "one")
    assert run.data.metrics["summary/test_accuracy"] == summary["test_accuracy"]
    assert {"accuracy.png", "config.yaml"} <= {each.path for each in client.list_artifacts(run.info.run_id)}


@WARNS
def test_wandb_keeps_the_run_offline(real: Callable[[str], Path]) -> None:
    pytest.importorskip("wandb")
    runs = real("wandb")
    kept = sorted((runs / "wandb").glob("offline-run-*/*.wandb"))
    name = json.loads((runs / "one" / trackers.IDS).read_text())["wandb"]
    assert len(kept) == 2 and all(path.stem == f"run-{name}" for path in kept)
    assert b"test_accuracy" in kept[0].read_bytes()
