"""`hvfreeze doctor --hosts a:2,b:2`: are these nodes fit to train together, and if not, what to mend.

Nodes are asked over ssh, with the Python and the directory of this process, as mpirun and horovodrun will use them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvfreeze.doctor.asking import ask, measure_ring
from hvfreeze.doctor.checks import CheckResult, exit_code, table
from hvfreeze.doctor.host_checks import (
    Host,
    check_cache_directory,
    check_clock,
    check_data_directory,
    check_ports,
    check_same,
    check_slots,
    check_ssh,
    check_versions,
)
from hvfreeze.doctor.network_checks import check_bandwidth, check_job, check_latency
from hvfreeze.errors import UsageError

HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9][0-9]{0,5}))?")
"""What a host may be called, with its slots: ssh takes a name that begins with - for an option, such as one that runs a
command. launch/hosts.sh and launch/restarts.py have the same rule."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in `a:2,b:2,c`; without a number a host takes one rank.

    Raises:
        UsageError: a part is not NAME or NAME:SLOTS, or a name is there twice.
    """
    hosts = tuple(_parse_host(part.strip(), source="--hosts") for part in text.split(","))
    return _without_repetition(hosts, source="--hosts")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file with a line a host: `a slots=2`, `a:2` or `a`; `#` begins a comment.

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
    found = HOST.fullmatch(part)
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
    """Print a table of all checks of these hosts; return 0 when they are usable together, 3 when there is a problem."""
    checks = host_checks(hosts, data_dir=data_dir, cache_dir=cache_dir)
    print(table(checks))
    return exit_code(checks)


def host_checks(
    hosts: Sequence[Host], *, data_dir: Path | None = None, cache_dir: Path | None = None
) -> list[CheckResult]:
    """Return all checks of these hosts, in the order of the table; takes seconds, whatever their number.

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
        answers = dict(zip([host.name for host in hosts], pool.map(lambda host: ask(host, order), hosts), strict=True))
    reached = [host for host in hosts if not answers[host.name].error]
    facts = {host.name: answers[host.name].facts for host in reached}
    checks = [check_ssh(answers)]
    if reached:
        links = measure_ring(reached, ports=ports)
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
            check_bandwidth(links),
            check_latency(links),
            check_job(links),
        ]
    return checks


def _ports(text: str) -> list[int]:
    if not text:
        return []
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found.group(1)) <= int(found.group(2)) < 65536:
        raise UsageError(f"HVFREEZE_PORTS ({text}) must be FIRST-LAST, two port numbers, such as 46000-46099")
    return [int(found.group(1)), int(found.group(2))]
