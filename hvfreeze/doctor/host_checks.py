"""What nodes must have in common: each check is a pure function from their answers to a `CheckResult`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.doctor.checks import CheckResult
from hvfreeze.doctor.remote import PACKAGES

CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Host:
    """A node as -H names it, and how many ranks it is to take."""

    name: str
    slots: int


@dataclass(frozen=True)
class Answer:
    """What a host said: `facts` as `hostprobe.facts` gives them, or `error` and its `remedy`.

    `asked` and `answered` are this machine's times around it, in seconds.
    """

    facts: Mapping[str, Any]
    error: str
    remedy: str
    asked: float
    answered: float


def check_ssh(answers: Mapping[str, Answer]) -> CheckResult:
    """Check that every host answers ssh without asking anything, and has this Python."""
    bad = {name: answer for name, answer in answers.items() if answer.error}
    if bad:
        value = "; ".join(f"{name}: {answer.error}" for name, answer in bad.items())
        return CheckResult("ssh", False, value, "; ".join(dict.fromkeys(answer.remedy for answer in bad.values())))
    return CheckResult("ssh", True, f"{_all(answers)} answer")


def check_versions(facts: Mapping[str, Mapping[str, Any]]) -> CheckResult:
    """Check that every host has the packages and mpirun, in the same versions as the first."""
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
    """Check that every host could write 1 MiB to `directory`."""
    bad = [f"{name}: {said['cache']}" for name, said in facts.items() if said["cache"]]
    if bad:
        remedy = "make room there, or give another --cache-dir"
        return CheckResult("cache directory", False, f"{directory}: {'; '.join(bad)}", remedy)
    return CheckResult("cache directory", True, f"{directory} is writable")


def check_data_directory(facts: Mapping[str, Mapping[str, Any]], *, directory: str) -> CheckResult:
    """Check that every host sees the same names under `directory`."""
    found = {name: str(said["data"]) for name, said in facts.items()}
    bad = [f"{name}: {value.removeprefix('error: ')}" for name, value in found.items() if value.startswith("error: ")]
    if bad:
        return CheckResult(
            "data directory", False, f"{directory}: {'; '.join(bad)}", "copy the data there, or share it"
        )
    return check_same("data directory", found, remedy=f"put the same {directory}")


def check_ports(facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[Host], *, ports: list[int]) -> CheckResult:
    """Check that every host has as many free ports in the range as its ranks and their daemon listen on."""
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
    """Check that every host's clock is this one's, as far as the moments of question and answer tell."""
    off = []
    for name, answer in answers.items():
        early, late = answer.asked - float(answer.facts["time"]), float(answer.facts["time"]) - answer.answered
        if max(early, late) > CLOCK_SECONDS:
            off.append(f"{name} is {max(early, late):.0f} s {'behind' if early > late else 'ahead'}")
    remedy = "training does not mind, file times and logs do: run an NTP client there" if off else ""
    return CheckResult("clock", True, "; ".join(off) or f"{_all(answers)} within {CLOCK_SECONDS:.0f} s", remedy)


def check_slots(facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[Host]) -> CheckResult:
    """Check that no host is to take more ranks than it has cores."""
    full = [f"{host.name}: {host.slots} ranks, {facts[host.name]['cores']} cores" for host in hosts]
    full = [text for text, host in zip(full, hosts, strict=True) if host.slots > int(facts[host.name]["cores"])]
    remedy = (
        "set OMPI_MCA_mpi_yield_when_idle=1 (the scripts in launch/ do), or give the host fewer slots" if full else ""
    )
    cores = sum(int(said["cores"]) for said in facts.values())
    return CheckResult(
        "cores", True, "; ".join(full) or f"{cores} for {sum(host.slots for host in hosts)} ranks", remedy
    )


def _all(names: Mapping[str, object]) -> str:
    return f"{len(names)} host{'s' * (len(names) > 1)}"
