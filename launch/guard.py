"""Runs a command so that signals reach the process that handles them, and no process is left at its end.

horovodrun leaves a shell in front of mpirun: a signal sent to it kills the shell, and mpirun and all ranks continue.

    python3 guard.py COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """The end of a command: its exit code (128 + number for a signal), and the signals that arrived meanwhile."""

    code: int
    signals: frozenset[signal.Signals]


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, prepare: Callable[[], None] | None = None
) -> Outcome:
    """Run the command in a session of its own until it and all processes that it started have ended.

    Args:
        command: program and arguments.
        environment: replaces this process's environment.
        prepare: called in the child before the program starts.
    """
    control = ctypes.CDLL(None).prctl
    # Orphans of the command become children of this process, so that it can find and end them.
    control(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    waited = {signal.SIGCHLD, *passed_on()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        try:
            control(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
            if prepare is not None:
                prepare()
            os.execvpe(command[0], list(command), {**os.environ} if environment is None else {**environment})
        except FileNotFoundError:
            print(f"{command[0]}: command not found", file=sys.stderr, flush=True)
        except BaseException as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)
    try:
        return _wait(child, waited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def passed_on() -> set[signal.Signals]:
    """Return the signals of PASSED_ON, except ignored ones such as SIGHUP under `nohup`."""
    return {number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}


def _wait(child: int, waited: set[signal.Signals]) -> Outcome:
    arrived: set[signal.Signals] = set()
    code: int | None = None
    give_up = float("inf")
    while True:
        for pid, status in _reap():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
                _signal_all(_descendants(), signal.SIGTERM)
        if code is not None and not _descendants():
            return Outcome(code if code >= 0 else 128 - code, frozenset(arrived))
        if time.monotonic() > give_up:
            _signal_all(_descendants(), signal.SIGKILL)
        # Undisturbed, it sleeps; only an end that has begun is watched.
        received = signal.sigwaitinfo(waited) if give_up == float("inf") else signal.sigtimedwait(waited, 0.1)
        if received is not None and received.si_signo != signal.SIGCHLD:
            number = signal.Signals(received.si_signo)
            arrived.add(number)
            if number in ENDING:
                give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
            _signal_all([_addressee(number, child)], number)


def _reap() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> list[int]:
    """Return the PIDs of all processes below this one, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # Bytes: the kernel cuts a name at 15 of them, also within a letter.
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except OSError:  # it has ended meanwhile, or is another user's on a system that hides those
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _addressee(number: signal.Signals, child: int) -> int:
    """Return the nearest process below this one that handles the signal, `child` if none does."""
    for pid in _descendants():
        try:
            lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        except OSError:
            continue
        masks = [int(line.split()[1], 16) for line in lines if line.startswith((b"SigBlk:", b"SigCgt:"))]
        if any(mask >> (number - 1) & 1 for mask in masks):
            return pid
    return child


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]).code)
