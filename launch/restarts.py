"""Restarts a training command from its last checkpoint when a rank has died.

    launch/restart --max-restarts 3 -- launch/horovodrun.sh -np 4 --hostfile FILE python -m hvfreeze train --run-dir DIR

--resume is added from the second attempt on. RUN_DIR/restarts.jsonl has a line per attempt. The number of ranks never
changes, because only the same number resumes bit for bit: with --drop-dead-hosts, the ranks of a dead host move to the
other hosts.

Exit codes in FINAL are not retried, because they would repeat. A preempted job (75) restarts at once, without backoff.
A signal to this program is passed on to the job, and ends both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import guard

FINAL = {
    0: "done",
    2: "usage",
    3: "data, cache or checkpoint refused",
    4: "ranks diverged",
    5: "numerics",
    126: "the command cannot be run",
    127: "there is no such command",
}
PREEMPTED = 75
REASONS = {**FINAL, 6: "a rank stalled", PREEMPTED: "preempted", 110: "the deadline passed", 205: "a node was lost"}
HOST_FLAGS = ("-H", "-host", "--host", "-hosts", "--hosts")
FILE_FLAGS = ("-hostfile", "--hostfile", "-machinefile", "--machinefile")
HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9][0-9]{0,5}))?")
"""A valid host name with slots. ssh takes a name that begins with - for an option, which may run a command.
launch/hosts.sh and `hvfreeze doctor` have the same rule."""


def reason(code: int) -> str:
    """Return the meaning of an exit code in words."""
    if code not in REASONS and code > 128 and code - 128 in set(signal.Signals):
        return f"ended by {signal.Signals(code - 128).name}"
    return REASONS.get(code, "failed")


def with_resume(command: Sequence[str]) -> list[str]:
    """Return `command` with --resume, once."""
    return list(command) if "--resume" in command else [*command, "--resume"]


def value_of(command: Sequence[str], flags: Sequence[str]) -> tuple[int, str] | None:
    """Return place and value of the first of these flags, given as `FLAG VALUE` or `FLAG=VALUE`."""
    for index, word in enumerate(command):
        flag, equals, value = word.partition("=")
        if flag in flags and (equals or index + 1 < len(command)):
            return index, value if equals else command[index + 1]
    return None


def refuse(message: str) -> NoReturn:
    """Print the message and end with code 2."""
    print(f"launch/restart: {message}", file=sys.stderr)
    raise SystemExit(2)


def hosts_of(command: Sequence[str]) -> dict[str, int]:
    """Return slots by host, from -H or the hostfile in `command`; empty if it names none.

    The slots of a host that is named several times, as in PBS's file, are summed. Ends with code 2 if a host name is
    invalid, the hostfile cannot be read, or it names no host.
    """
    if found := value_of(command, HOST_FLAGS):
        parts = found[1].split(",")
    elif found := value_of(command, FILE_FLAGS):
        try:
            text = Path(found[1]).read_text()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            refuse(f"the hostfile ({found[1]}) cannot be read: {why}; name a readable file")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        parts = [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]
        if not parts:
            refuse(f"the hostfile ({found[1]}) names no host; write one host per line, or leave it out")
    else:
        return {}
    hosts: dict[str, int] = {}
    for part in parts:
        match = HOST.fullmatch(part)
        if match is None:
            refuse(f"{part!r} must be NAME or NAME:SLOTS; correct -H or the hostfile")
        hosts[match[1]] = hosts.get(match[1], 0) + int(match[2] or 1)
    return hosts


def with_hosts(command: Sequence[str], hosts: dict[str, int]) -> list[str]:
    """Return `command` with these hosts in place of its own hosts."""
    found = value_of(command, (*HOST_FLAGS, *FILE_FLAGS))
    assert found is not None
    index = found[0]
    after = index + (1 if "=" in command[index] else 2)
    text = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
    return [*command[:index], "-H", text, *command[after:]]


def spread(hosts: dict[str, int], ranks: int) -> dict[str, int]:
    """Return hosts with enough slots for `ranks`: their own if they suffice, else evenly more on each."""
    if sum(hosts.values()) >= ranks:
        return hosts
    return {name: max(slots, math.ceil(ranks / len(hosts))) for name, slots in hosts.items()}


def answers(host: str) -> bool:
    """Return True if a command can be run on the host over ssh."""
    if host in ("localhost", "127.0.0.1", os.uname().nodename):
        return True
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, "true"]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def without_dead_hosts(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (`command` on the hosts that answer, the other hosts); unchanged if it names none or none answers.

    The number of ranks stays the same: a command without -np has one rank per slot, so -np is added.
    """
    hosts = hosts_of(command)
    if not hosts:
        return list(command), []
    with ThreadPoolExecutor(len(hosts)) as pool:
        alive = {host for host, answered in zip(hosts, pool.map(answers, hosts), strict=True) if answered}
    dead = [host for host in hosts if host not in alive]
    if not dead or not alive:
        return list(command), []
    found = value_of(command, ("-np", "-n", "--num-proc"))
    ranks = int(found[1]) if found else sum(hosts.values())
    moved = with_hosts(command, spread({host: hosts[host] for host in hosts if host in alive}, ranks))
    if found is None:
        place = moved.index("-H")
        moved[place:place] = ["-np", str(ranks)]
    return moved, dead


def write_line(run_dir: Path, entry: dict[str, Any], *, make: bool = True) -> None:
    """Append the entry to the run directory's restarts.jsonl; print a message if that fails.

    Without `make`, nothing is written if there is no run directory.
    """
    path = run_dir / "restarts.jsonl"
    try:
        if not make and not run_dir.exists():
            return
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(json.dumps(entry) + "\n")
    except OSError as error:  # what becomes of the job does not hang on its record
        print(f"launch/restart: {path} cannot be written: {error.strerror}; continuing without it", file=sys.stderr)


def pause(seconds: float) -> bool:
    """Wait; return True if a signal asked to end meanwhile, or since the last attempt's end."""
    return signal.sigtimedwait(guard.passed_on(), seconds) is not None


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], Path]:
    """Return options, command and run directory; ends with code 2 if something is wrong."""
    parser = argparse.ArgumentParser(prog="launch/restart", usage="%(prog)s [options] -- COMMAND...")
    parser.add_argument("--max-restarts", type=int, default=3, help="number of restarts, for any reason (3)")
    parser.add_argument(
        "--backoff", type=float, default=5.0, help="seconds before the first restart, doubled each time (5)"
    )
    parser.add_argument("--drop-dead-hosts", action="store_true", help="leave out hosts that do not answer ssh")
    parser.add_argument("command", nargs="*", help="must contain --run-dir")
    options = parser.parse_args(argv)
    if options.max_restarts < 0 or options.backoff < 0:
        parser.error("--max-restarts and --backoff must be at least 0")
    run_dir = value_of(options.command, ("--run-dir",))
    if run_dir is None:
        parser.error("COMMAND must contain --run-dir DIR, so that a restart can resume")
    return options, options.command, Path(run_dir[1])


def main(argv: Sequence[str]) -> int:
    """Return the exit code of the last attempt."""
    options, command, run_dir = parse(argv)
    # Blocked for good: a signal that arrives between two waits is kept for the next one.
    signal.pthread_sigmask(signal.SIG_BLOCK, guard.passed_on())
    attempt, failures, dropped = 1, 0, list[str]()
    piped = value_of(command, FILE_FLAGS)
    if piped and not value_of(command, HOST_FLAGS) and not os.path.isfile(piped[1]):
        # A pipe such as <(...) can be read only once, so the launcher could not read it.
        command = with_hosts(command, hosts_of(command))
    while True:
        # Before the job: the file may be gone after it.
        hosts = hosts_of(command)
        began, start = time.time(), time.monotonic()
        outcome = guard.run(command)
        told = bool(outcome.signals)
        preempted = outcome.code == PREEMPTED
        again = outcome.code not in FINAL and attempt <= options.max_restarts and not told
        failures += not preempted
        seconds = min(options.backoff * 2 ** (failures - 1), 300.0) if again and not preempted else 0.0
        entry = {
            "attempt": attempt,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "seconds": round(time.monotonic() - start, 3),
            "code": outcome.code,
            "reason": reason(outcome.code),
            "signals": sorted(number.name for number in outcome.signals),
            "hosts": hosts,
            "dropped": dropped,
            "next": f"restart after {seconds:g} s" if again else "end",
            "command": command,
        }
        # A run directory that the command never made would only be in the way of the next try.
        write_line(run_dir, entry, make=again)
        if not again:
            return outcome.code
        print(
            f"launch/restart: attempt {attempt}: {entry['reason']} (code {outcome.code}); {entry['next']}",
            file=sys.stderr,
        )
        if pause(seconds):
            write_line(run_dir, {"attempt": attempt, "next": "told to end while waiting"})
            return outcome.code
        command = with_resume(command)
        if options.drop_dead_hosts:
            command, dropped = without_dead_hosts(command)
        attempt += 1
