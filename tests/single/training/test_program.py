"""The whole program as one process: the end of a run, its continuation, and its name."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hvfreeze.__main__ import main
from hvfreeze.runs.files import lock_directory
from hvfreeze.training import loop
from hvfreeze.training.evaluation import Score
from hvfreeze.training.job import Job
from hvfreeze.training.run import resume_advice
from tests.program import ROOT, Outcome, call, contents, digest_of

SMALL = ["--model", "mlp-16x16", "--train-samples", "40", "--batch-size", "16", "--validation-fraction", "0.2"]
SMALL += ["--epochs", "1", "--threads", "1", "--lr", "0.01"]
OUTPUT_LOST = "hvfreeze: error: standard output cannot be written: No space left on device\n"


def train(folder: Path, *flags: str) -> Outcome:
    return call("train", *SMALL, "--run-dir", str(folder), *flags)


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_is_private_and_logs_what_it_said(finished: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in (finished, *finished.rglob("*"))}
    assert {mode for name, mode in modes.items() if Path(name).suffix or name == ".lock"} == {0o600}, modes
    assert modes["run"] == modes["checkpoints"] == 0o700, modes
    log = (finished / "log.txt").read_text()
    assert (
        re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d model: mlp-16x16 \(", log)
        and "epoch 1 of 1 | 0 of 3 blocks frozen | " in log
    )


def test_a_run_is_private_that_has_its_cache_inside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = train(folder, *"--freeze static --cut 1 --augment none --cache on --cache-shared".split())
    assert outcome.returncode == 0, str(outcome)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "cache")] == [0o700, 0o700]


def test_a_loss_that_overflows_in_an_evaluation_is_said_and_records_stay_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "evaluate", lambda *_, chooses: {"model": Score(loss=float("nan"), accuracy=0.25)})
    outcome = train(tmp_path / "run", "--keep", "best")
    assert outcome.returncode == 0 and "is NaN or Inf" in outcome.stdout, str(outcome)
    line, summary = ((tmp_path / "run" / name).read_text() for name in ("metrics.jsonl", "summary.json"))
    assert json.loads(line, parse_constant=pytest.fail)["test_loss"] is None
    assert json.loads(summary, parse_constant=pytest.fail)["kept"]["model"]["loss"] is None


def test_more_epochs_go_on_as_if_they_had_been_asked_for_at_first(run_dir: Path, tmp_path: Path) -> None:
    outcome = train(run_dir, "--epochs", "2", "--resume")
    assert outcome.returncode == 0, str(outcome)
    assert "note: changed since the run started: epochs: 1 before, 2 now" in outcome.stdout
    straight = train(tmp_path / "straight", "--epochs", "2", "--quiet")
    assert (straight.returncode, straight.stdout) == (0, ""), str(straight)
    assert digest_of(run_dir) == digest_of(tmp_path / "straight")
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"]["epochs"] == 2
    assert "epoch 2 of 2 | 0 of 3 blocks frozen | " in (tmp_path / "straight" / "log.txt").read_text()


def test_other_threads_are_refused_unless_inexactness_is_accepted(run_dir: Path) -> None:
    before = contents(run_dir)
    outcome = train(run_dir, "--epochs", "2", "--threads", "2", "--resume")
    assert outcome.returncode == 3 and "threads: 1 before, 2 now" in outcome.messages[0], str(outcome)
    assert contents(run_dir) == before
    outcome = train(run_dir, "--epochs", "2", "--threads", "2", "--resume", "--resume-inexact")
    assert (
        outcome.returncode == 0 and "note: changed since the run started: threads: 1 before, 2 now" in outcome.stdout
    ), str(outcome)
    recorded = json.loads((run_dir / "environment.json").read_text())
    assert recorded["threads"] == 2 and "threads: 1 before, 2 now" in recorded["resumed"][0]["changed"]


def test_a_finished_run_is_complete_unless_its_summary_is_damaged(run_dir: Path) -> None:
    outcome = train(run_dir, "--resume", "--json")
    assert "is complete; nothing to do" in outcome.stdout and outcome.returncode == 0
    assert json.loads(outcome.stdout.splitlines()[-1])["parameter_digest"] == digest_of(run_dir)
    whole, ended = (run_dir / "summary.json").read_text(), digest_of(run_dir)
    (run_dir / "summary.json").write_text(whole[: len(whole) // 2])
    outcome = train(run_dir, "--resume")
    assert outcome.returncode == 3 and "summary.json is damaged" in outcome.messages[0], str(outcome)
    (run_dir / "summary.json").unlink()
    assert train(run_dir, "--resume").returncode == 0 and digest_of(run_dir) == ended


def test_a_finished_run_whose_checkpoints_were_removed_stays_as_it_is(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    before = contents(run_dir)
    del before["log.txt"]
    for flags, code, words in (
        ([], 0, "is complete; nothing to do"),
        (["--epochs", "2"], 3, "no checkpoint to continue from"),
    ):
        outcome = train(run_dir, *flags, "--resume")
        assert outcome.returncode == code and words in outcome.stdout + outcome.stderr, str(outcome)
        assert {name: found for name, found in contents(run_dir).items() if name != "log.txt"} == before


@pytest.mark.parametrize("config", ["a: &a [x, x]\nb: &b [*a, *a]\n", "[" * 50_000], ids=["aliases", "deep"])
@pytest.mark.timeout(60)
def test_a_bomb_in_place_of_the_configuration_is_refused(run_dir: Path, config: str) -> None:
    (run_dir / "config.yaml").write_text(config)
    outcome = train(run_dir, "--resume")
    assert outcome.returncode == 3 and "config.yaml is damaged" in outcome.messages[0], str(outcome)


def test_a_job_does_not_enter_a_directory_in_which_another_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = lock_directory(tmp_path / "run")
    before = contents(tmp_path)
    outcome = train(tmp_path / "run")
    lock.release()
    assert outcome.returncode == 2 and "is in use by process" in outcome.messages[0], str(outcome)
    assert contents(tmp_path) == before
    assert train(tmp_path / "run", "--quiet").returncode == 0


def test_a_refused_start_leaves_no_directory(tmp_path: Path) -> None:
    weights = ["--freeze", "gradient-norm", "--vote-weight", "1,2"]
    for flags in (weights, ["--blocks", "nowhere"], ["--train-samples", "5"], ["--lr", "nan"]):
        assert train(tmp_path / "run", *flags).returncode == 2
    assert os.listdir(tmp_path) == []


def test_what_is_probably_not_meant_is_noted(tmp_path: Path) -> None:
    silent = train(tmp_path / "silent", "--freeze", "gradient-norm")
    assert "there are no votes: the first would follow step 2, and training has 2 steps" in silent.stdout, str(silent)
    frozen = train(tmp_path / "frozen", "--freeze", "static", "--cut", "2")
    assert "note: the first 2 blocks keep their random initialisation" in frozen.stdout, str(frozen)
    assert "no vote" not in frozen.stdout and "random init" not in silent.stdout


def test_standard_output_on_a_full_disk_ends_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for flags, code in (([], 0), (["--json"], 3)):
        folder = tmp_path / f"run{code}"
        with open("/dev/full", "w") as full, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", full)
            assert main(["train", *SMALL, "--run-dir", str(folder), *flags]) == code
        said = capsys.readouterr().err
        assert said.endswith(OUTPUT_LOST) or code == 0, said
        assert (folder / "summary.json").exists() and "epoch 1 of 1" in (folder / "log.txt").read_text()


def start_with_closed(streams: str, *words: str) -> None:
    """Start the program without some standard streams; it must end as others do."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "hvfreeze", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr


def test_a_command_that_is_started_without_standard_output_ends_as_others_do(finished: Path) -> None:
    start_with_closed(">&-", "runs", str(finished.parent))


@pytest.mark.seldom
def test_a_run_that_is_started_without_standard_streams_ends_as_others_do(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start_with_closed("<&- >&- 2>&-", "train", *SMALL, "--json", "--run-dir", str(folder))
    assert (folder / "summary.json").exists() and "epoch 1 of 1" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_says_that_its_output_was_lost(unbuffered: str, finished: Path) -> None:
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "hvfreeze", "runs", str(finished.parent)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, cwd=ROOT, env=variables, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 3 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.endswith(OUTPUT_LOST)


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")
@pytest.mark.parametrize("reports", [False, pytest.param(True, marks=pytest.mark.seldom)])
def test_names_that_the_output_cannot_show_end_nothing(
    reports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode("g\u00fct \u56fe ".encode() + b"\xff")
    report = ["report", str(folder), "--out", str(tmp_path / "report")]
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for words in (["train", *SMALL, "--run-dir", str(folder)], ["runs", str(tmp_path)], *[report] * reports):
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
        assert main(words) == 0
        assert words == report or b"g\\xfct \\u56fe" in shown.getvalue()
    assert os.fsencode(folder) in (folder / "log.txt").read_bytes()


ENDLESS = [*SMALL, "--epochs", "100000", "--checkpoint-every", "2steps", "--run-dir"]


def told_to_continue(folder: Path, said: str, begins: str, by: str = "") -> bool:
    """Return whether the last line, and the log, say where a run has stopped and how it continues."""
    told = said.splitlines()[-1]
    checkpoint = r"continue from the last checkpoint \(step \d+\) with: hvfreeze "
    found = re.match(rf"hvfreeze: {begins} after step \d+ of 200000{by}; {checkpoint}", told)
    logged = f"{begins} after step" in (folder / "log.txt").read_text()
    return bool(found) and told.endswith(f"hvfreeze train --run-dir {folder} --resume") and logged


@pytest.mark.seldom
def test_who_interrupts_a_process_is_told_how_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "hvfreeze", "train", *ENDLESS, str(folder)]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not list(folder.glob("checkpoints/step-*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130, said
    assert "Traceback" not in said and told_to_continue(folder, said, "interrupted"), said


@pytest.mark.parametrize(
    ("number", "code", "begins", "by"),
    [(signal.SIGINT, 130, "interrupted", ""), (signal.SIGTERM, 75, "stopped", " by SIGTERM")],
)
def test_who_stops_a_run_is_told_how_it_goes_on(
    number: signal.Signals, code: int, begins: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step = loop.train_step

    def step(job: Job, batches: Any) -> float:
        if job.step == 3:
            os.kill(os.getpid(), number)
        return make_step(job, batches)

    monkeypatch.setattr(loop, "train_step", step)
    outcome = call("train", *ENDLESS, str(tmp_path / "run"))
    assert outcome.returncode == code and "Traceback" not in outcome.stderr, str(outcome)
    assert told_to_continue(tmp_path / "run", outcome.stderr, begins, by), str(outcome)


def test_who_interrupts_a_run_before_its_first_step_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "train_step", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    outcome = call("train", *ENDLESS, str(tmp_path / "run"))
    assert outcome.returncode == 130
    told = "hvfreeze: interrupted before the first step; no checkpoint yet, start again with: "
    assert outcome.stderr.splitlines()[-1].startswith(told), str(outcome)


OWN_MODEL = """
import torch
from torch import nn


def make(num_classes):
    head = nn.Linear(16, num_classes)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), head)
    nn.init.constant_(model[0].weight, 0.25)
    model[0].requires_grad_(False)
    return model
"""


@pytest.mark.parametrize("freeze", ["none", "gradient-norm"])
def test_what_a_users_own_model_has_frozen_stays_as_it_was(
    freeze: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_frozen.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    outcome = train(tmp_path / "run", "--model", "half_frozen:make", "--freeze", freeze)
    assert outcome.returncode == 0, str(outcome)
    state = torch.load(tmp_path / "run/model.pt", weights_only=True)
    assert bool((state["0.weight"] == 0.25).all()), "what the user had frozen was trained"
    assert float(state["4.weight"].std()) > 0


@pytest.mark.parametrize(
    ("fit", "words"), [("kernel", ["auto", "digits"]), ("exact", ["train", "--head-fit", "exact", "--augment", "none"])]
)
def test_too_few_samples_to_choose_a_penalty_by_are_refused_by_what_was_asked_for(
    fit: str, words: list[str], tmp_path: Path
) -> None:
    small = ["--model", "mlp-16x16", "--train-samples", "10", "--batch-size", "2", "--threads", "1"]
    outcome = call(*words, *small, "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 2
    assert f"--head-fit ({fit}, as in hvfreeze auto) cannot choose a penalty from 10 training samples" in str(outcome)
    assert "use 6 or more, with two of a class" in str(outcome)
    assert "validation-fraction" not in str(outcome) and "Traceback" not in str(outcome)
    assert not (tmp_path / "run").exists()


@pytest.mark.seldom
def test_dropout_before_an_mlp_head_does_not_depend_on_when_the_model_was_looked_at(tmp_path: Path) -> None:
    flags = ["--model", "mnasnet0_5", "--strategy", "subnets", "--head", "mlp-8", "--local-steps", "3", "--epochs", "3"]
    for every in ("1", "3"):
        outcome = train(tmp_path / every, *flags, "--evaluate-every", every)
        assert outcome.returncode == 0, str(outcome)
    assert digest_of(tmp_path / "1") == digest_of(tmp_path / "3")


def test_a_batch_of_one_sample_trains_where_statistics_are_kept(tmp_path: Path) -> None:
    flags = ["--batch-size", "1", "--image-size", "16", "--train-samples", "12"]
    outcome = train(tmp_path / "run", *flags, "--statistics", "kept")
    assert outcome.returncode == 0, str(outcome)


def test_critics_that_stop_say_what_became_of_the_updates_since(tmp_path: Path) -> None:
    flags = ["--strategy", "local-critics", "--parts", "2", "--lr", "1e30", "--epochs", "3", "--label-smoothing", "0"]
    outcome = train(tmp_path / "run", *flags)
    assert (
        outcome.returncode != 0
        and "NaN or Inf in a loss or gradient on 1 of 1 rank; later updates are invalid" in str(outcome)
    )


def test_one_of_a_kind_is_singular(tmp_path: Path) -> None:
    flags = ["--train-samples", "33", "--batch-size", "32", "--freeze", "static", "--cut", "1", "--lr-warmup", "9"]
    flags += ["--validation-fraction", "0.03", "--keep", "best", "--early-stop", "1"]
    said = train(tmp_path / "run", *flags).stdout
    assert "1 rank" in said and "1 epoch of 1 step," in said and "training has 1 step " in said, said
    assert "note: the first block keeps its random initialisation" in said, said
    assert "note: 1 training sample is held out; " in said and "there is only one evaluation" in said, said


@pytest.mark.parametrize(
    ("ranks", "begins"), [(1, "hvfreeze train --run-dir"), (3, "mpirun -np 3 --bind-to none hvfreeze train --run-dir")]
)
def test_the_way_on_of_an_interrupted_job_starts_as_many_ranks(tmp_path: Path, ranks: int, begins: str) -> None:
    job: Any = SimpleNamespace(directory=tmp_path, world=SimpleNamespace(size=ranks))
    assert resume_advice(job).startswith(f"no checkpoint yet, start again with: {begins}")
