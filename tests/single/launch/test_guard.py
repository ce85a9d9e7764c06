"""launch/guard.py: signals pass to a command, and nothing that it started outlives it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.mpirun import command_of

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def guarded(script: str) -> subprocess.Popen[str]:
    # No other shell: dash blocks all signals for a moment before it waits, as who means to handle them does.
    command = [sys.executable, str(LAUNCH / "guard.py"), "bash", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


IMPATIENT = """
import sys
sys.path.insert(0, sys.argv[1])
import guard
guard.GRACE_SECONDS = 0.5
sys.exit(guard.run(sys.argv[2:]).code)
"""


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_signal_passes_a_shell_that_does_not_handle_it() -> None:
    handler = "bash -c \"trap 'exit 75' USR1; echo up; while :; do sleep 0.05; done\"; code=$?; exit $code"
    process = guarded(handler)
    assert read_line(process) == "up"
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_nothing_that_a_command_started_outlives_it() -> None:
    process = guarded("sleep 3600 & echo $!; exit 3")
    left = int(read_line(process))
    process.communicate(timeout=60)
    assert process.returncode == 3
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


IGNORING = """
import signal, sys
sys.path.insert(0, sys.argv[1])
import guard, restarts
signal.signal(signal.SIGHUP, signal.SIG_IGN)
told = "trap 'exit 7' USR1; kill -HUP $PPID; kill -USR1 $PPID; while :; do sleep 0.05; done"
print(guard.run(["sh", "-c", told]))
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    signal.raise_signal(number)
    print(restarts.pause(0.0))
"""


def test_a_signal_that_was_ignored_beforehand_stays_ignored() -> None:
    """As after `nohup`, also while a restart waits."""
    done = subprocess.run([sys.executable, "-c", IGNORING, str(LAUNCH)], capture_output=True, text=True, timeout=60)
    ended, *paused = done.stdout.splitlines()
    assert "code=7" in ended and "SIGUSR1" in ended and "SIGHUP" not in ended, done
    assert paused == ["False", "True"]


def test_a_command_that_ignores_its_end_is_killed_with_all_that_it_started() -> None:
    script = "trap '' TERM; sh -c 'echo $$; while :; do sleep 0.1; done'"
    command = [sys.executable, "-c", IMPATIENT, str(LAUNCH), "bash", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    left = int(read_line(process))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_a_process_whose_name_is_cut_within_a_letter_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "\u043e\u0431\u0443\u0447\u0435\u043d\u0438\u0435.sh"
    named.write_text("#!/bin/sh\ntrap 'exit 75' USR1\necho $$\nwhile :; do sleep 0.05; done\n")
    named.chmod(0o755)
    monkeypatch.syspath_prepend(str(LAUNCH))
    process = guarded(f"exec {named}")
    try:
        assert importlib.import_module("cluster_supervisor")._lives(int(read_line(process)))
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75


def test_a_process_that_may_not_be_read_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path) -> bytes:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.syspath_prepend(str(LAUNCH))
    guard = importlib.import_module("guard")
    monkeypatch.setattr(Path, "read_bytes", hidden)
    monkeypatch.setattr(Path, "read_text", hidden)
    assert guard._descendants() == []
    monkeypatch.setattr(guard, "_descendants", lambda: [os.getpid()])
    assert guard._addressee(signal.SIGUSR1, 1) == 1


def test_a_command_that_is_not_there_is_said() -> None:
    done = subprocess.run([sys.executable, str(LAUNCH / "guard.py"), "no-such-command"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "no-such-command: command not found\n")


def test_a_guard_that_is_killed_takes_its_command_along() -> None:
    process = guarded('exec python3 -c "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"')
    left = int(read_line(process))
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while command_of(left) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not command_of(left)
