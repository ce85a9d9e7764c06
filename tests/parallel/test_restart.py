from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.mpirun import ROOT
from tests.parallel.nodes import attempts, launch, wait_until

RESTART = str(ROOT / "launch/restart")

pytestmark = pytest.mark.fault


def job(folder: Path, *codes: int) -> list[str]:
    """A command that notes its arguments, and ends with one code after the other (negative: by that signal)."""
    script = folder / "job.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "log = pathlib.Path(__file__).with_name('calls')\n"
        "calls = json.loads(log.read_text()) if log.exists() else []\n"
        "log.write_text(json.dumps([*calls, sys.argv[1:]]))\n"
        f"code = {list(codes)}[len(calls)]\n"
        "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)\n"
    )
    return [sys.executable, str(script), "--run-dir", str(folder / "run")]


def calls(folder: Path) -> list[list[str]]:
    found: list[list[str]] = json.loads((folder / "calls").read_text())
    return found


def restart(*words: str) -> subprocess.CompletedProcess[str]:
    return launch([RESTART, *words])


def test_a_dead_job_is_started_again_with_resume_until_it_is_done(tmp_path: Path) -> None:
    command = job(tmp_path, -signal.SIGKILL, 1, 0)
    assert restart("--backoff", "0.1", "--", *command).returncode == 0
    plain = ["--run-dir", str(tmp_path / "run")]
    assert calls(tmp_path) == [plain, [*plain, "--resume"], [*plain, "--resume"]]
    lines = attempts(tmp_path / "run")
    assert [line["code"] for line in lines] == [137, 1, 0]
    assert [line["reason"] for line in lines] == ["ended by SIGKILL", "failed", "done"]
    assert [line["next"] for line in lines] == ["restart after 0.1 s", "restart after 0.2 s", "end"]


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5])
def test_what_would_come_out_the_same_is_not_tried_again(tmp_path: Path, code: int) -> None:
    assert restart("--backoff", "0", "--", *job(tmp_path, code)).returncode == code
    assert len(calls(tmp_path)) == 1
    # A run directory made for the record alone would be in the way of the next try.
    assert not (tmp_path / "run").exists()


def test_what_may_pass_is_tried_again_but_not_for_ever(tmp_path: Path) -> None:
    done = restart("--max-restarts", "2", "--backoff", "0", "--", *job(tmp_path, 205, 110, 6, 0))
    assert done.returncode == 6
    assert len(calls(tmp_path)) == 3
    assert attempts(tmp_path / "run")[-1]["next"] == "end"


def test_a_preempted_job_goes_on_at_once_and_is_given_resume_once(tmp_path: Path) -> None:
    assert restart("--backoff", "200", "--", *job(tmp_path, 75, 0), "--resume").returncode == 0
    assert [call.count("--resume") for call in calls(tmp_path)] == [1, 1]
    assert attempts(tmp_path / "run")[0]["next"] == "restart after 0 s"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_ends_the_job_and_is_no_reason_to_start_it_again(tmp_path: Path, number: signal.Signals) -> None:
    waiting = f"trap 'exit 75' USR1; trap 'exit 143' TERM INT; touch {tmp_path}/up; while :; do sleep 0.05; done"
    command = [RESTART, "--backoff", "0", "--", "bash", "-c", waiting, "job", "--run-dir", str(tmp_path)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until((tmp_path / "up").exists, what="the job")
    running.send_signal(number)
    running.communicate(timeout=60)
    assert running.returncode == (75 if number == signal.SIGUSR1 else 143)
    (line,) = attempts(tmp_path)
    assert (line["signals"], line["next"]) == ([number.name], "end")


def test_a_signal_while_waiting_ends_the_waiting(tmp_path: Path) -> None:
    running = subprocess.Popen([RESTART, "--backoff", "1000", "--", *job(tmp_path, 1, 0)], stderr=subprocess.PIPE)
    wait_until((tmp_path / "run/restarts.jsonl").exists, what="the first attempt's end")
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 1
    assert len(calls(tmp_path)) == 1


def test_a_signal_between_two_waits_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = tmp_path / "run/restarts.jsonl"
    os.mkfifo(record)  # opening it to write waits for a reader: until then the program is between two waits
    running = subprocess.Popen([RESTART, "--backoff", "1000", "--", *job(tmp_path, 1, 0)], stderr=subprocess.PIPE)
    wait_until((tmp_path / "calls").exists, what="the first attempt")
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    wait_until(lambda: not children.read_text(), what="the first attempt's end")
    running.send_signal(signal.SIGTERM)
    with record.open() as lines:
        assert json.loads(lines.readline())["code"] == 1
        running.communicate(timeout=60)
    assert running.returncode == 1
    assert len(calls(tmp_path)) == 1


def test_processes_that_a_dead_job_left_are_gone_before_the_next_attempt(tmp_path: Path) -> None:
    leaving = f"cd {tmp_path}; [ -e pid ] && kill -0 $(cat pid) && exit 2; sleep 3600 & echo $! > pid; exit 1"
    command = ["bash", "-c", leaving, "job", "--run-dir", str(tmp_path)]
    assert restart("--max-restarts", "1", "--backoff", "0", "--", *command).returncode == 1
    assert len(attempts(tmp_path)) == 2


def test_a_command_without_run_directory_is_refused() -> None:
    done = restart("--", "true")
    assert done.returncode == 2
    assert "COMMAND must contain --run-dir DIR" in done.stderr
