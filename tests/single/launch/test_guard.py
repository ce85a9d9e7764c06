"""launch/guard.py: signals pass to a command, and nothing that it started outlives it."""

from __future__ import annotations

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
    command = [sys.executable, str(LAUNCH / "guard.py"), "sh", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


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


@pytest.mark.slow
def test_a_command_that_ignores_its_end_is_killed_with_all_that_it_started() -> None:
    process = guarded("trap '' TERM; sh -c 'echo $$; while :; do sleep 0.1; done'")
    left = int(read_line(process))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


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
