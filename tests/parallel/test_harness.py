"""What tests start ranks with: a job's end is its result, and a copy of a standing process is like a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import pool
from tests.parallel.mpirun import ROOT, TIMED_OUT, Launcher, command_of, environment, mpirun
from tests.parallel.nodes import wait_until
from tests.parallel.sizes import seldom

VISIBLE = Path(__file__).with_name("workers") / "visible.py"
COPIES = pytest.mark.skipif(pool.FRESH in os.environ, reason="--fresh: there are no copies")

pytestmark = pytest.mark.mpi


def seen(*modes: str, **options: Any) -> list[dict[str, Any]]:
    """What each of two ranks sees of itself, in the end."""
    env = {"PYTHONWARNINGS": "ignore:torchvision:RuntimeWarning"}
    result = mpirun(2, VISIBLE, args=[*modes, "see"], timeout=60, env=env, **options)
    assert result.returncode == 0, str(result)
    assert (result.stdout, result.stderr) == ("done\n" * 2, ""), str(result)
    return result.ranks


def apart(ranks: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in rank.items() if name not in names} for rank in ranks]


@COPIES
@pytest.mark.torture
def test_copies_see_what_processes_see_and_nothing_of_the_job_before(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = seen()
    # As if a test had loaded torch's compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    seen("spoil")
    again = seen()
    assert [rank["parent"] for rank in again] == pool.processes()[:2]
    assert apart(again, "own") == apart(copies, "own")
    assert apart(copies, "own", "parent") == apart(seen(fresh=True), "own", "parent")
    # Numbers that nobody has seeded differ between processes, and so between copies. The seed of hashes, the last, is
    # a standing process's: it differs between ranks only.
    for one, other, later in zip(copies[0]["own"], copies[1]["own"], again[0]["own"], strict=True):
        assert one != other
        assert one != later or one == copies[0]["own"][-1]


@COPIES
@pytest.mark.torture
def test_copies_take_command_folder_variables_and_warnings_from_who_asks(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "timeout": 60,
        "cwd": tmp_path,
        "env": {"HOME": None, "TMPDIR": str(tmp_path), "ADDED": "1", "PYTHONWARNINGS": "error::FutureWarning"},
        "every_rank_reports": True,
    }
    as_module = ["-W", "ignore", "-m", "tests.parallel.workers.visible", "see"]
    copy, process = (mpirun(1, as_module, fresh=fresh, **options).ranks[0] for fresh in (False, True))
    assert copy["parent"] in pool.processes() and process["parent"] not in pool.processes()
    assert apart([copy], "own", "parent") == apart([process], "own", "parent")
    assert (copy["folder"], copy["temporary files"]) == (str(tmp_path), str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("raise", 1, "LookupError: on the last rank"),
        ("kill", 128 + signal.SIGKILL, "signal 9"),
        seldom("exit", 3, "Exit code:    3"),
        seldom("say", 1, "some words"),
    ],
)
def test_the_end_of_one_rank_is_the_jobs(mode: str, code: int, words: str) -> None:
    result = mpirun(2, VISIBLE, args=[mode], timeout=60, every_rank_reports=False)
    assert result.returncode == code and words in result.stderr, str(result)
    assert ("Traceback" in result.stderr) == (mode == "raise"), str(result)
    assert "standing.py" not in result.stderr and "becoming.py" not in result.stderr, str(result)


@pytest.mark.parametrize("launcher", ["mpirun", seldom("horovodrun")])
def test_a_job_that_hangs_is_ended_at_its_deadline_and_shows_its_stacks(launcher: Launcher) -> None:
    result = mpirun(2, VISIBLE, timeout=6, args=["hang"], every_rank_reports=False, launcher=launcher)
    assert result.returncode == TIMED_OUT and 'visible.py", line' in result.stderr, str(result)


@pytest.mark.parametrize(
    ("mode", "message"),
    [("first", "1 of 2 ranks reported"), ("orphan", r"still alive after the job's end: .*sleep 3600")],
)
def test_a_missing_report_and_a_process_left_behind_fail_the_test(
    mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.parallel.mpirun.GRACE_SECONDS", 1.0)
    with pytest.raises(AssertionError, match=message):
        mpirun(2, VISIBLE, timeout=60, args=[mode])


@COPIES
@pytest.mark.parametrize("changes", [{"OMP_NUM_THREADS": "2"}, {"LD_BIND_NOW": "1"}])
def test_what_loading_depends_on_makes_a_process_load_for_itself(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_ACCESS_TOKEN", "x")
    (rank,) = mpirun(1, VISIBLE, args=["parent"], timeout=60, env=changes).ranks
    assert rank["parent"] not in pool.processes()
    assert changes.items() <= rank["variables"].items() and "SOME_ACCESS_TOKEN" not in rank["variables"]


@COPIES
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_copies_rest_while_mpi_waits_and_are_not_told() -> None:
    (rank,) = mpirun(1, VISIBLE, args=["parent"], timeout=60).ranks
    assert rank["parent"] in pool.processes() and "LD_PRELOAD" not in rank["variables"]
    assert "/rest.so" in Path(f"/proc/{rank['parent']}/maps").read_text()


@COPIES
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_reaches_the_copy_which_ends_with_its_process(number: int, code: int, tmp_path: Path) -> None:
    variables = environment({}, out=tmp_path, timeout=60, ranks=1)
    process = subprocess.Popen([sys.executable, str(VISIBLE), "wait"], env=variables, cwd=ROOT)
    waiting = tmp_path / "waiting"
    wait_until(lambda: waiting.exists() and waiting.read_text(), what="the copy")
    copy = int(waiting.read_text())
    assert copy != process.pid
    process.send_signal(number)
    assert process.wait(30) == code
    wait_until(lambda: not command_of(copy), what="the copy's end")
