"""`hvfreeze doctor --hosts a:2,b:2`: are these nodes fit to train together, and if not, what to mend.

Nodes are asked over ssh, with the Python and the directory of this process, as mpirun and horovodrun will use them. Every
check is a pure function from the nodes' answers to a `CheckResult`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvfreeze.doctor import CheckResult, exit_code, table
from hvfreeze.errors import UsageError
from hvfreeze.hostprobe import PACKAGES

ANSWER_SECONDS = 60.0
BANDWIDTH_SECONDS = 0.5
CLOCK_SECONDS = 2.0
PROBE = Path(__file__).with_name("hostprobe.py")
# ssh's own words, and what they mean to somebody who wants to train.
SSH_TROUBLE = (
    ("not resolve", "the name has no address", "correct --hosts or the hostfile, or /etc/hosts"),
    ("Permission denied", "ssh refuses the key", "`ssh-copy-id {host}`, until `ssh {host} true` asks nothing"),
    ("Host key", "ssh does not trust its host key", "compare it, then `ssh-keyscan {host} >> ~/.ssh/known_hosts`"),
    ("timed out", "no answer", "is it up, and its network reachable from here?"),
    ("No route", "no answer", "is it up, and its network reachable from here?"),
    ("refused", "no ssh server", "start sshd there"),
    ("not found", "no Python at {python}", "run `make setup` there, or share this environment with it"),
    ("No such file", "no Python at {python}", "run `make setup` there, or share this environment with it"),
)


@dataclass(frozen=True)
class Host:
    """A node as -H names it, and how many ranks it is to take."""

    name: str
    slots: int


@dataclass(frozen=True)
class Answer:
    """What a host said: `facts` as `hostprobe.facts` gives them, or `error` and its `remedy`; local times in seconds."""

    facts: Mapping[str, Any]
    error: str
    remedy: str
    asked: float
    answered: float


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from `a:2,b:2,c`; without a number a host takes one rank.

    Raises:
        UsageError: a part is not NAME or NAME:SLOTS, or a name is there twice.
    """
    hosts = tuple(_parse_host(part.strip(), source="--hosts") for part in text.split(","))
    return _without_repetition(hosts, source="--hosts")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts from a file with a line a host: `a slots=2`, `a:2` or `a`; `#` begins a comment.

    Raises:
        UsageError: the file cannot be read, is empty, or has a line of another form.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}: give a file with a line a host") from error
    parts = [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]
    if not parts:
        raise UsageError(f"--hostfile {path} names no host: write a line a host, such as `node0 slots=1`")
    return _without_repetition(
        tuple(_parse_host(part, source=f"--hostfile {path}") for part in parts), source=str(path)
    )


def _parse_host(part: str, *, source: str) -> Host:
    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9][0-9]{0,5}))?", part)
    if found is None:
        raise UsageError(
            f"{source}: {part!r} is not NAME or NAME:SLOTS (`node0:1`; in a hostfile also `node0 slots=1`)"
        )
    return Host(found.group(1), int(found.group(2) or 1))


def _without_repetition(hosts: tuple[Host, ...], *, source: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{source} names {', '.join(twice)} more than once: name a host once, with all its slots")
    return hosts


def run_hosts_doctor(hosts: Sequence[Host], *, data_dir: Path | None = None, cache_dir: Path | None = None) -> int:
    """Prints a table of all checks of these hosts; 0 when they are usable together (notes do not count), 3 otherwise."""
    checks = host_checks(hosts, data_dir=data_dir, cache_dir=cache_dir)
    print(table(checks))
    return exit_code(checks)


def host_checks(
    hosts: Sequence[Host], *, data_dir: Path | None = None, cache_dir: Path | None = None
) -> list[CheckResult]:
    """All checks of these hosts, in the order of the table; takes seconds, whatever their number.

    Args:
        hosts: the nodes; the ports in $HVFREEZE_PORTS (FIRST-LAST) are checked too when that is set.
        data_dir: must hold the same names on every node; None is not checked.
        cache_dir: must be writable on every node; None is the current directory.
    """
    ports = _ports(os.environ.get("HVFREEZE_PORTS", ""))
    order = {
        "do": "facts",
        "cache_dir": str((cache_dir or Path.cwd()).absolute()),
        "data_dir": str(data_dir.absolute()) if data_dir else "",
        "ports": ports,
    }
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = dict(zip([host.name for host in hosts], pool.map(lambda host: _ask(host, order), hosts), strict=True))
    reached = [host for host in hosts if not answers[host.name].error]
    facts = {host.name: answers[host.name].facts for host in reached}
    checks = [check_ssh(answers)]
    if reached:
        checks += [
            check_versions(facts),
            check_same(
                "code", {name: str(said["code"]) for name, said in facts.items()}, remedy="install the same hvfreeze"
            ),
            check_cache_directory(facts, directory=str(order["cache_dir"])),
            *([check_data_directory(facts, directory=str(data_dir))] if data_dir else []),
            *([check_ports(facts, reached, ports=ports)] if ports else []),
            check_clock({host.name: answers[host.name] for host in reached}),
            check_slots(facts, reached),
            check_bandwidth(measure_ring(reached, ports=ports)),
        ]
    return checks


def check_ssh(answers: Mapping[str, Answer]) -> CheckResult:
    """Every host answers ssh without asking anything, and has this Python."""
    bad = {name: answer for name, answer in answers.items() if answer.error}
    if bad:
        value = "; ".join(f"{name}: {answer.error}" for name, answer in bad.items())
        return CheckResult("ssh", False, value, "; ".join(dict.fromkeys(answer.remedy for answer in bad.values())))
    return CheckResult("ssh", True, f"{_all(answers)} answer")


def check_versions(facts: Mapping[str, Mapping[str, Any]]) -> CheckResult:
    """Every host has the packages and mpirun, in the same versions as the first."""
    kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "Python": lambda said: str(said["python"]),
        "mpirun": lambda said: str(said["mpi"]),
        **{name: lambda said, name=name: str(said["versions"][name]) for name in PACKAGES},  # type: ignore[misc]
    }
    remedy = "run `make setup` there, or share one environment between the nodes"
    parts = []
    for kind, of in kinds.items():
        found = {name: of(said) for name, said in facts.items()}
        usual = max(found.values(), key=list(found.values()).count)
        lacking = [name for name, value in found.items() if value == "missing"]
        others = [f"{name} {value}" for name, value in found.items() if value not in ("missing", usual)]
        parts += [f"no {kind} on {', '.join(lacking)}"] if lacking else []
        parts += [f"{kind} {usual}, but {', '.join(others)}"] if others else []
    if parts:
        return CheckResult("versions", False, "; ".join(parts), remedy)
    return CheckResult("versions", True, f"{_all(facts)} alike")


def check_same(name: str, found: Mapping[str, str], *, remedy: str) -> CheckResult:
    """Every host gave the same value, and it is not "missing"."""
    usual = max(found.values(), key=list(found.values()).count)
    lacking = [host for host, value in found.items() if value == "missing"]
    others = [host for host, value in found.items() if value not in (usual, "missing")]
    if lacking:
        return CheckResult(name, False, f"missing on {', '.join(lacking)}", f"{remedy} there, or share it")
    if others:
        return CheckResult(name, False, f"different on {', '.join(others)}", f"{remedy} on all nodes")
    return CheckResult(name, True, f"{_all(found)} alike")


def check_cache_directory(facts: Mapping[str, Mapping[str, Any]], *, directory: str) -> CheckResult:
    """Every host could write 1 MiB to `directory`."""
    bad = [f"{name}: {said['cache']}" for name, said in facts.items() if said["cache"]]
    if bad:
        remedy = "make room there, or give another --cache-dir"
        return CheckResult("cache directory", False, f"{directory}: {'; '.join(bad)}", remedy)
    return CheckResult("cache directory", True, f"{directory} is writable")


def check_data_directory(facts: Mapping[str, Mapping[str, Any]], *, directory: str) -> CheckResult:
    """Every host sees the same names under `directory`."""
    found = {name: str(said["data"]) for name, said in facts.items()}
    bad = [f"{name}: {value.removeprefix('error: ')}" for name, value in found.items() if value.startswith("error: ")]
    if bad:
        return CheckResult(
            "data directory", False, f"{directory}: {'; '.join(bad)}", "copy the data there, or share it"
        )
    return check_same("data directory", found, remedy=f"put the same {directory}")


def check_ports(facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[Host], *, ports: list[int]) -> CheckResult:
    """Every host has as many free ports in the range as its ranks and their daemon listen on."""
    span = f"{ports[0]}-{ports[1]}"
    used = {name: list(said["used_ports"]) for name, said in facts.items()}
    words = [f"{name}: {', '.join(map(str, taken[:5]))} in use" for name, taken in used.items() if taken]
    few = [host for host in hosts if ports[1] - ports[0] + 1 - len(used[host.name]) < 2 * host.slots + 1]
    if few:
        wanted = max(2 * host.slots + 1 for host in few)
        value = "; ".join([*words, f"too few are free on {', '.join(host.name for host in few)}"])
        return CheckResult(
            "ports", False, f"{span}: {value}", f"HVFREEZE_PORTS needs {wanted} free ports on each of them"
        )
    remedy = "others of the range are taken instead" if words else ""
    return CheckResult("ports", True, f"{span}: {'; '.join(words) or 'free'}", remedy)


def check_clock(answers: Mapping[str, Answer]) -> CheckResult:
    """Every host's clock is this one's, as far as can be told from when it was asked and when it answered."""
    off = []
    for name, answer in answers.items():
        early, late = answer.asked - float(answer.facts["time"]), float(answer.facts["time"]) - answer.answered
        if max(early, late) > CLOCK_SECONDS:
            off.append(f"{name} is {max(early, late):.0f} s {'behind' if early > late else 'ahead'}")
    remedy = "training does not mind, file times and logs do: run an NTP client there" if off else ""
    return CheckResult("clock", True, "; ".join(off) or f"{_all(answers)} within {CLOCK_SECONDS:.0f} s", remedy)


def check_slots(facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[Host]) -> CheckResult:
    """No host is to take more ranks than it has cores."""
    full = [f"{host.name}: {host.slots} ranks, {facts[host.name]['cores']} cores" for host in hosts]
    full = [text for text, host in zip(full, hosts, strict=True) if host.slots > int(facts[host.name]["cores"])]
    remedy = (
        "set OMPI_MCA_mpi_yield_when_idle=1 (the scripts in launch/ do), or give the host fewer slots" if full else ""
    )
    cores = sum(int(said["cores"]) for said in facts.values())
    return CheckResult(
        "cores", True, "; ".join(full) or f"{cores} for {sum(host.slots for host in hosts)} ranks", remedy
    )


def check_bandwidth(rates: Mapping[tuple[str, str], float | str]) -> CheckResult:
    """Every host reaches the next; a link at less than half of the fastest is noted (rates: Mbit/s, or why there is none)."""
    if not rates:
        return CheckResult("bandwidth", True, "one host")
    broken = [f"{sender} -> {receiver}: {rate}" for (sender, receiver), rate in rates.items() if isinstance(rate, str)]
    if broken:
        remedy = "open the firewall between the nodes (HVFREEZE_PORTS limits the ports), or name the network in HVFREEZE_INTERFACES"
        return CheckResult("bandwidth", False, "; ".join(broken), remedy)
    measured = {pair: float(rate) for pair, rate in rates.items()}
    (sender, receiver), least = min(measured.items(), key=lambda item: item[1])
    most = max(measured.values())
    remedy = f"{sender} -> {receiver} slows every allreduce down to its rate" if least < most / 2 else ""
    return CheckResult("bandwidth", True, f"{least:.0f} to {most:.0f} Mbit/s, all sending to the next at once", remedy)


def measure_ring(hosts: Sequence[Host], *, ports: list[int]) -> dict[tuple[str, str], float | str]:
    """Mbit/s from each host to the next, all at once as in a ring allreduce, or why there is none; empty for one host."""
    if len(hosts) < 2:
        return {}
    token = secrets.token_hex(16)
    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    listeners = [_start(receiver, {"do": "listen", "token": token, "ports": ports}) for _, receiver in pairs]
    senders = []
    for (sender, receiver), listener in zip(pairs, listeners, strict=True):
        assert listener.stdout is not None
        port = _first_answer(listener.stdout).get("port", 0)
        order = {"do": "send", "token": token, "host": receiver.name, "port": port, "seconds": BANDWIDTH_SECONDS}
        senders.append(_start(sender, order))
    rates: dict[tuple[str, str], float | str] = {}
    for (sender, receiver), listening, sending in zip(pairs, listeners, senders, strict=True):
        sent = _first_answer(sending.communicate(timeout=ANSWER_SECONDS)[0].splitlines())
        trouble = sent.get("error", "no answer")
        if trouble:
            listening.kill()
        received = _first_answer(listening.communicate(timeout=ANSWER_SECONDS)[0].splitlines())
        rate = received.get("bytes", 0) * 8e-6 / received.get("seconds", 1.0)
        rates[sender.name, receiver.name] = trouble or rate or "nothing arrived"
    return rates


def _start(host: Host, order: Mapping[str, Any]) -> subprocess.Popen[str]:
    """The probe, running on the host with this order."""
    search = os.environ.get("PYTHONPATH", "")
    words = [
        "env",
        f"PATH={os.environ.get('PATH', os.defpath)}",
        f"PYTHONPATH={search}",
        sys.executable,
        "-",
        json.dumps(order),
    ]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"
    here = host.name in ("localhost", "127.0.0.1", socket.gethostname())
    reach = ["sh", "-c"] if here else ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host.name]
    pipe = subprocess.PIPE
    with PROBE.open() as text:
        return subprocess.Popen([*reach, remote], stdin=text, stdout=pipe, stderr=pipe, text=True)


def _ask(host: Host, order: Mapping[str, Any]) -> Answer:
    asked = time.time()
    process = _start(host, order)
    try:
        output, trouble = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, trouble = process.communicate()
        trouble = f"{trouble}\ntimed out after {ANSWER_SECONDS:.0f} s"
    facts = _first_answer(output.splitlines())
    if facts:
        return Answer(facts, "", "", asked, time.time())
    last = trouble.strip().splitlines()[-1] if trouble.strip() else f"ended with code {process.returncode}"
    for words, meaning, remedy in SSH_TROUBLE:
        if words in trouble:
            names = {"host": host.name, "python": sys.executable}
            return Answer({}, meaning.format(**names), remedy.format(**names), asked, time.time())
    return Answer({}, last, f"try `ssh {host.name} true`", asked, time.time())


def _first_answer(lines: Iterable[str]) -> dict[str, Any]:
    """The first JSON object among the lines, {} without one; a login script may print before it."""
    for line in lines:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    return {}


def _ports(text: str) -> list[int]:
    if not text:
        return []
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found.group(1)) <= int(found.group(2)) < 65536:
        raise UsageError(f"HVFREEZE_PORTS ({text}) must be FIRST-LAST, two port numbers, such as 46000-46099")
    return [int(found.group(1)), int(found.group(2))]


def _all(names: Mapping[str, object]) -> str:
    return f"{len(names)} host{'s' * (len(names) > 1)}"
