"""A copy of a standing process is to a program what a process of its own is, and no job notices the one before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import pool
from tests.parallel.mpirun import ROOT, command_of, environment, mpirun
from tests.parallel.nodes import wait_until

VISIBLE = Path(__file__).with_name("workers") / "visible.py"
MODULE = "tests.parallel.workers.visible"

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(pool.FRESH in os.environ, reason="--fresh: there are no copies")]


def seen(*modes: str, **options: Any) -> list[dict[str, Any]]:
    """What each of two ranks sees of itself, in the end."""
    env = {"PYTHONWARNINGS": "ignore:torchvision:RuntimeWarning"}
    result = mpirun(2, VISIBLE, args=[*modes, "see"], timeout=60, env=env, **options)
    assert result.returncode == 0, str(result)
    assert (result.stdout, result.stderr) == ("done\n" * 2, ""), str(result)
    return result.ranks


def apart(ranks: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in rank.items() if name not in names} for rank in ranks]


def test_copies_see_what_processes_see_and_nothing_of_the_job_before(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = seen()
    # As if a test had loaded torch's compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    assert [rank["parent"] for rank in copies] == pool.processes()[:2]
    seen("spoil")
    again = seen()
    assert [rank["parent"] for rank in again] == pool.processes()[:2]
    assert apart(again, "own") == apart(copies, "own")
    assert apart(copies, "own", "parent") == apart(seen(fresh=True), "own", "parent")
    # What nobody has seeded differs between processes, and so it must between copies: a program that depended on it
    # would otherwise pass. The seed of hashes, the last, is a standing process's: it differs between ranks only.
    for one, other, later in zip(copies[0]["own"], copies[1]["own"], again[0]["own"], strict=True):
        assert one != other
        assert one != later or one == copies[0]["own"][-1]


def test_copies_take_command_folder_variables_and_warnings_from_who_asks(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "timeout": 60,
        "cwd": tmp_path,
        "env": {"HOME": None, "TMPDIR": str(tmp_path), "ADDED": "1", "PYTHONWARNINGS": "error::FutureWarning"},
        "every_rank_reports": True,
    }
    as_module = ["-W", "ignore", "-m", MODULE, "see"]
    copy, process = (mpirun(1, as_module, fresh=fresh, **options).ranks[0] for fresh in (False, True))
    assert copy["parent"] in pool.processes() and process["parent"] not in pool.processes()
    assert apart([copy], "own", "parent") == apart([process], "own", "parent")
    assert (copy["folder"], copy["temporary files"], copy["package"]) == (str(tmp_path), str(tmp_path), MODULE)


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("raise", 1, "LookupError: on the last rank"),
        ("kill", 128 + signal.SIGKILL, "signal 9"),
        ("exit", 3, "Exit code:    3"),
        ("say", 1, "some words"),
    ],
)
def test_what_becomes_of_one_rank_is_the_jobs_result_and_the_next_job_is_undisturbed(
    mode: str, code: int, words: str
) -> None:
    before = pool.processes()
    result = mpirun(2, VISIBLE, args=[mode], timeout=60, every_rank_reports=False)
    assert result.returncode == code, str(result)
    assert words in result.stderr, str(result)
    assert ("Traceback" in result.stderr) == (mode == "raise"), str(result)
    assert "standing.py" not in result.stderr and "becoming.py" not in result.stderr, str(result)
    assert mpirun(2, VISIBLE, timeout=60, every_rank_reports=False).stdout == "done\n" * 2
    assert not before or pool.processes()[:2] == before[:2]


def test_standing_processes_that_end_fail_one_test_with_what_they_said_and_the_next_gets_new_ones() -> None:
    assert mpirun(3, VISIBLE, timeout=60, every_rank_reports=False).returncode == 0
    first, _, third = before = pool.processes()[:3]
    for process in (first, third):
        os.kill(process, signal.SIGABRT)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with pytest.raises(
        AssertionError, match=r"(?s)process 0 has ended with -6: .*Fatal.*process 2 has ended with -6: .*Fatal"
    ):
        pool.check()
    pool.check()
    ranks = mpirun(3, VISIBLE, args=["parent"], timeout=60).ranks
    assert [rank["parent"] for rank in ranks] == pool.processes()[:3]
    assert [one == other for one, other in zip(before, pool.processes()[:3], strict=True)] == [False, True, False]


def test_a_process_that_a_copy_forked_and_left_is_found_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parallel.mpirun.GRACE_SECONDS", 1.0)
    with pytest.raises(AssertionError, match="still alive after the job's end"):
        mpirun(2, VISIBLE, args=["fork"], timeout=60, every_rank_reports=False)


@pytest.mark.parametrize("changes", [{"OMP_NUM_THREADS": "2"}, {"LD_BIND_NOW": "1"}])
def test_what_loading_depends_on_makes_a_process_load_for_itself(changes: dict[str, str]) -> None:
    (rank,) = mpirun(1, VISIBLE, args=["parent"], timeout=60, env=changes).ranks
    assert rank["parent"] not in pool.processes()
    assert changes.items() <= rank["variables"].items()


def waiting(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process that asked for a copy, and the copy."""
    variables = environment({}, out=folder, timeout=60, ranks=1)
    process = subprocess.Popen([sys.executable, str(VISIBLE), "wait"], env=variables, cwd=ROOT)
    wait_until(lambda: (folder / "waiting").exists() and (folder / "waiting").read_text(), what="the copy")
    return process, int((folder / "waiting").read_text())


def test_a_signal_reaches_the_copy_and_its_end_is_the_processes(tmp_path: Path) -> None:
    process, copy = waiting(tmp_path)
    assert copy != process.pid
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 75
    assert not Path(f"/proc/{copy}").exists()


def test_a_copy_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    process, copy = waiting(tmp_path)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    wait_until(lambda: not command_of(copy), what="the copy's end")


def test_standing_processes_and_copies_end_with_the_tests_that_are_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from tests.parallel import pool, test_pool\n"
        "pool.LOADED = ()\n"
        "folder = pathlib.Path.cwd()\n"
        "process, copy = test_pool.waiting(folder)\n"
        "(folder / 'part').write_text(f'{process.pid} {copy} {pool.processes()[0]}')\n"
        "(folder / 'part').rename('processes')\n"
        "time.sleep(3600)\n"
    )
    variables = environment({"PYTHONPATH": str(ROOT)}, out=tmp_path, timeout=60)
    tests = subprocess.Popen([sys.executable, "-c", code], env=variables, cwd=tmp_path)
    wait_until((tmp_path / "processes").exists, what="a copy")
    found = [int(word) for word in (tmp_path / "processes").read_text().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in found)
    tests.kill()
    tests.wait()
    for pid in found:
        wait_until(lambda pid=pid: not command_of(pid), what="the end of all")
