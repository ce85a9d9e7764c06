"""`hvfreeze doctor --hosts a:2,b:2`: checks whether these nodes can train together.

Nodes are asked over ssh, with the Python and the directory of this process, as mpirun and horovodrun will use them.
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvfreeze.doctor import host_checks as checks
from hvfreeze.doctor.host_checks import Answer, Host, Link
from hvfreeze.doctor.this_machine import CheckResult, exit_code, table
from hvfreeze.errors import UsageError

ANSWER_SECONDS = 60.0
BANDWIDTH_SECONDS = 0.5
PROBE = Path(__file__).with_name("remote.py")
LOOPBACK = ("localhost", "127.0.0.1")
"""Names of the local machine."""
SENT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that locate Python, its packages and its libraries; launchers send them too."""
# ssh's own words, and what they mean to somebody who wants to train.
SSH_TROUBLE = (
    ("not resolve", "the name has no address", "correct --hosts, the hostfile or /etc/hosts"),
    (
        "Permission denied",
        "ssh rejects the key",
        "run `ssh-copy-id {host}` until `ssh {host} true` works without a password",
    ),
    ("Host key", "the host key is unknown to ssh", "verify it, then run `ssh-keyscan {host} >> ~/.ssh/known_hosts`"),
    ("timed out", "no answer", "check that it is up and reachable from here"),
    ("No route", "no answer", "check that it is up and reachable from here"),
    ("refused", "no ssh server", "start sshd there"),
    ("shared libraries", "{last}", "put it into a folder of LD_LIBRARY_PATH there; this machine's value is used"),
    ("not found", "no Python at {python}", "run `make setup` there, or share this environment with it"),
    ("No such file", "no Python at {python}", "run `make setup` there, or share this environment with it"),
)


def measure_ring(hosts: Sequence[Host], *, ports: list[int]) -> dict[tuple[str, str], Link | str]:
    """Measure the link from each host to the next, all at once as in a ring allreduce; return it or an error.

    A single host has no next one: {}.
    """
    if len(hosts) < 2:
        return {}
    token = secrets.token_hex(16)
    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    listeners = [_start(receiver, {"do": "listen", "token": token, "ports": ports}) for _, receiver in pairs]
    senders = []
    for (sender, receiver), listener in zip(pairs, listeners, strict=True):
        assert listener.stdout is not None
        port = _first_answer(listener.stdout).get("port", 0)
        # Another machine would take the loopback for itself.
        named = receiver.name if _is_here(sender) or receiver.name not in LOOPBACK else socket.gethostname()
        order = {"do": "send", "token": token, "host": named, "port": port, "seconds": BANDWIDTH_SECONDS}
        senders.append(_start(sender, order))
    links: dict[tuple[str, str], Link | str] = {}
    for (sender, receiver), listening, sending in zip(pairs, listeners, senders, strict=True):
        sent = _first_answer(sending.communicate(timeout=ANSWER_SECONDS)[0].splitlines())
        trouble = sent.get("error", "no answer")
        if trouble:
            listening.kill()
        received = _first_answer(listening.communicate(timeout=ANSWER_SECONDS)[0].splitlines())
        rate = received.get("bytes", 0) * 8e-6 / received.get("seconds", 1.0)
        found = Link(rate, sent.get("latency", 0.0)) if rate else "nothing arrived"
        links[sender.name, receiver.name] = trouble or found
    return links


def _start(host: Host, order: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start the probe on the host with this order, and return its process."""
    variables = [f"{name}={os.environ[name]}" for name in SENT_VARIABLES if os.environ.get(name)]
    words = ["env", *variables, sys.executable, "-", json.dumps(order)]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"
    reach = ["sh", "-c"] if _is_here(host) else ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host.name]
    pipe = subprocess.PIPE
    with PROBE.open() as text:
        return subprocess.Popen([*reach, remote], stdin=text, stdout=pipe, stderr=pipe, text=True)


def _is_here(host: Host) -> bool:
    return host.name in (*LOOPBACK, socket.gethostname())


def ask(host: Host, order: Mapping[str, Any]) -> Answer:
    """Return the host's answer to an order, or the error and its remedy."""
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
            names = {"host": host.name, "python": sys.executable, "last": last}
            return Answer({}, meaning.format(**names), remedy.format(**names), asked, time.time())
    return Answer({}, last, f"check `ssh {host.name} true`", asked, time.time())


def _first_answer(lines: Iterable[str]) -> dict[str, Any]:
    """Return the first JSON object among the lines, {} without one; a login script may print lines before it."""
    for line in lines:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    return {}


HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9][0-9]{0,5}))?")
"""A valid host name with slots. ssh takes a name that begins with - for an option, which may run a command.
launch/hosts.sh and launch/restarts.py have the same rule."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in `a:2,b:2,c`; without a number a host gets one rank.

    Raises UsageError if a part is not NAME or NAME:SLOTS, or a name occurs twice.
    """
    return _hosts([part.strip() for part in text.split(",")], source="--hosts")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file with one host per line: `a slots=2`, `a:2` or `a`; `#` begins a comment.

    Raises UsageError if the file cannot be read, is empty, or has an invalid line.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UsageError(
            f"--hostfile {path} cannot be read: {error.strerror}; give a file with one host per line"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--hostfile {path} is not UTF-8 text; give a file with one host per line") from error
    parts = [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]
    if not parts:
        raise UsageError(f"--hostfile {path} names no host; write one host per line, such as `node0 slots=1`")
    return _hosts(parts, source=f"--hostfile {path}")


def _hosts(parts: Sequence[str], *, source: str) -> tuple[Host, ...]:
    hosts = []
    for part in parts:
        found = HOST.fullmatch(part)
        if found is None:
            rule = "must be NAME or NAME:SLOTS (`node0:1`; in a hostfile also `node0 slots=1`)"
            raise UsageError(f"{source}: {part!r} {rule}")
        hosts.append(Host(found.group(1), int(found.group(2) or 1)))
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{source} names {', '.join(twice)} more than once; name each host once, with all its slots")
    return tuple(hosts)


def run_hosts_doctor(hosts: Sequence[Host], *, data_dir: Path | None = None, cache_dir: Path | None = None) -> int:
    """Print a table of all checks of these hosts; return 0 if they can train together, 3 if there is a problem."""
    found = host_checks(hosts, data_dir=data_dir, cache_dir=cache_dir)
    print(table(found, about="This host is" if len(hosts) == 1 else "These hosts are"))
    return exit_code(found)


def host_checks(
    hosts: Sequence[Host], *, data_dir: Path | None = None, cache_dir: Path | None = None
) -> list[CheckResult]:
    """Return all checks of these hosts, in the order of the table; takes seconds, for any number of hosts."""
    ports = _ports(os.environ.get("HVFREEZE_PORTS", ""))
    order = {
        "do": "facts",
        "cache_dir": str((cache_dir or Path.cwd()).absolute()),
        "data_dir": str(data_dir.absolute()) if data_dir else "",
        "ports": ports,
    }
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = dict(zip([host.name for host in hosts], pool.map(lambda host: ask(host, order), hosts), strict=True))
    reached = [host for host in hosts if not answers[host.name].error]
    facts = {host.name: answers[host.name].facts for host in reached}
    if not reached:
        return [checks.check_ssh(answers)]
    code = {name: str(said["code"]) for name, said in facts.items()}
    links = measure_ring(reached, ports=ports)
    return [
        checks.check_ssh(answers),
        checks.check_versions(facts),
        checks.check_same("code", code, remedy="install the same hvfreeze"),
        checks.check_cache_directory(facts, directory=str(order["cache_dir"])),
        *([checks.check_data_directory(facts, directory=str(data_dir))] if data_dir else []),
        *([checks.check_ports(facts, reached, ports=ports)] if ports else []),
        checks.check_clock({host.name: answers[host.name] for host in reached}),
        checks.check_slots(facts, reached),
        checks.check_bandwidth(links),
        checks.check_latency(links),
        checks.check_job(links),
    ]


def _ports(text: str) -> list[int]:
    if not text:
        return []
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found.group(1)) <= int(found.group(2)) < 65536:
        raise UsageError(f"HVFREEZE_PORTS ({text}) must be FIRST-LAST, two port numbers, such as 46000-46099")
    return [int(found.group(1)), int(found.group(2))]
