"""The guard of a rank that has left MPI: whom it ends, whom it leaves alone, and when it ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvfreeze.comm import end_guard
from hvfreeze.comm.stall_watch import stopped_here
from tests.parallel.mpirun import ROOT, command_of
from tests.parallel.nodes import wait_until

RANK, LIMIT = 3, 20.0
STAYS = "from hvfreeze.comm.end_guard import guard_end; guard_end(3, 3600); print('up', flush=True); input()"


def looks(monkeypatch: pytest.MonkeyPatch, seen: Sequence[tuple[float, bool]]) -> list[tuple[int, int]]:
    """Let the guard look once for each (seconds since the look before, whether its rank is stopped); whom it killed."""
    clock, left, killed = 0.0, list(seen), list[tuple[int, int]]()
    stopped = False

    def wait(*_: object) -> tuple[list[int], list[int], list[int]]:
        nonlocal clock, stopped
        if not left:
            return [0], [], []
        seconds, stopped = left.pop(0)
        clock += seconds
        return [], [], []

    monkeypatch.setattr(end_guard, "select", SimpleNamespace(select=wait))
    monkeypatch.setattr(end_guard, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(end_guard, "is_stopped", lambda process: stopped)
    monkeypatch.setattr(end_guard.os, "kill", lambda process, number: killed.append((process, number)))
    end_guard.watch(RANK, LIMIT, os.getppid())
    return killed


def test_who_is_stopped_for_the_limit_and_some_seconds_is_named_and_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    needed = int((LIMIT + end_guard.SPEAK_SECONDS) / end_guard.LOOK_SECONDS)
    assert looks(monkeypatch, [(end_guard.LOOK_SECONDS, True)] * needed) == []
    assert capfd.readouterr().err == ""
    more = [(end_guard.LOOK_SECONDS, True)] * (needed + 1)
    assert looks(monkeypatch, more) == [(os.getppid(), signal.SIGKILL)]
    said = capfd.readouterr().err
    assert said.startswith(
        f"hvfreeze: error: rank {RANK} on {os.uname().nodename} has left MPI, but has been suspended for 26 s"
    ), said
    assert said.count("\n") == 1 and "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS sets the limit" in said


@pytest.mark.parametrize(
    "seen",
    [
        # Slow, but not stopped: what a program does at its exit is its own affair.
        [(0.5, False)] * 1000,
        # Stopped again and again, never for long.
        ([(0.5, True)] * 40 + [(0.5, False)]) * 20,
        # The whole job was stopped for an hour, the guard with it, and is let go on: the guard looks first.
        [(0.5, False), (3600.0, True), (0.5, True), (0.5, False)],
    ],
)
def test_who_goes_on_is_left_alone(monkeypatch: pytest.MonkeyPatch, seen: Sequence[tuple[float, bool]]) -> None:
    assert looks(monkeypatch, seen) == []


def places_of(process: int, pipe: str) -> list[str]:
    """The numbers under which a process has a pipe open."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += [entry.name] if os.readlink(entry) == pipe else []
    return found


def guards_of(process: int) -> list[int]:
    """The guards that a process has started."""
    children = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [pid for pid in children if "end_guard.py" in command_of(pid)]


def guard_of(process: int) -> int:
    """The guard of a process that has started it."""
    # Its command shows a moment after it is there.
    wait_until(lambda: guards_of(process), what="the guard")
    (guard,) = guards_of(process)
    return guard


@pytest.fixture
def guarded() -> Iterator[subprocess.Popen[str]]:
    """A process that has a guard, in a group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAYS],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def test_a_guard_is_in_its_ranks_group_and_not_ended_by_what_asks_ranks_to_leave(
    guarded: subprocess.Popen[str],
) -> None:
    guard = guard_of(guarded.pid)
    assert os.getpgid(guard) == guarded.pid
    # It hears of the end at once: its rank alone holds the other end of the pipe.
    pipe = os.readlink(f"/proc/{guard}/fd/0")
    assert (places_of(guard, pipe), len(places_of(guarded.pid, pipe))) == (["0"], 1)
    lines = dict(line.split(":\t") for line in Path(f"/proc/{guard}/status").read_text().splitlines())
    blocked = sum(1 << (number - 1) for number in (signal.SIGUSR1, signal.SIGINT))
    assert int(lines["SigBlk"], 16) == blocked, lines
    guarded.kill()
    guarded.wait()
    wait_until(lambda: not command_of(guard), what="the guard's end")


def test_a_process_is_stopped_until_it_is_let_go_on() -> None:
    found = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for number, option in ((signal.SIGSTOP, os.WUNTRACED), (signal.SIGCONT, os.WCONTINUED)):
            found.append(end_guard.is_stopped(process.pid))
            process.send_signal(number)
            os.waitpid(process.pid, option)
        found.append(end_guard.is_stopped(process.pid))
        process.kill()
    assert [*found, end_guard.is_stopped(process.pid)] == [False, True, False, False]


def test_a_process_whose_name_is_cut_within_a_letter_is_seen_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "\u043e\u0431\u0443\u0447\u0435\u043d\u0438\u0435.sh"
    named.write_text("#!/bin/sh\necho up\nread line\n")
    named.chmod(0o755)
    monkeypatch.setenv("PMIX_NAMESPACE", str(tmp_path))
    rank = {**os.environ, "OMPI_COMM_WORLD_RANK": "3"}
    with subprocess.Popen([named], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=rank) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert end_guard.is_stopped(process.pid)
            assert stopped_here() == "rank 3, which does not respond"
        finally:
            process.kill()


def test_a_rank_that_can_start_no_process_ends_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", refuse)
    end_guard.guard_end(RANK, LIMIT)
