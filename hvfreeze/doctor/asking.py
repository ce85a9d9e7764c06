"""Asking hosts over ssh, with the Python and the directory of this process, as mpirun and horovodrun will use them."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvfreeze.doctor.host_checks import Answer, Host
from hvfreeze.doctor.network_checks import Link

ANSWER_SECONDS = 60.0
BANDWIDTH_SECONDS = 0.5
PROBE = Path(__file__).with_name("remote.py")
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


def measure_ring(hosts: Sequence[Host], *, ports: list[int]) -> dict[tuple[str, str], Link | str]:
    """Return the link from each host to the next, all used at once as in a ring allreduce, or why there is none.

    One host alone has no next: {}.
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
        order = {"do": "send", "token": token, "host": receiver.name, "port": port, "seconds": BANDWIDTH_SECONDS}
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
    """Return the probe, running on the host with this order."""
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


def ask(host: Host, order: Mapping[str, Any]) -> Answer:
    """Return what the host says to an order, or why it does not answer and what to do about it."""
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
    """Return the first JSON object among the lines, {} without one; a login script may print before it."""
    for line in lines:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    return {}
