"""Checks of nodes that will train together: pure functions from their answers and links to a `CheckResult`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvfreeze.doctor.remote import PACKAGES
from hvfreeze.doctor.this_machine import CheckResult
from hvfreeze.wording import plural

CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Host:
    """A node by its name in -H, and its number of ranks."""

    name: str
    slots: int


Facts = Mapping[str, Mapping[str, Any]]
"""Facts by host, as `remote.facts` returns them."""


@dataclass(frozen=True)
class Answer:
    """A host's `facts`, or an `error` and its `remedy`; `asked` and `answered` are this machine's times, in seconds."""

    facts: Mapping[str, Any]
    error: str
    remedy: str
    asked: float
    answered: float


def check_ssh(answers: Mapping[str, Answer]) -> CheckResult:
    """Check that every host answers ssh without a prompt, and has this Python."""
    bad = {name: answer for name, answer in answers.items() if answer.error}
    if bad:
        value = "; ".join(f"{name}: {answer.error}" for name, answer in bad.items())
        return CheckResult("ssh", False, value, "; ".join(dict.fromkeys(answer.remedy for answer in bad.values())))
    return CheckResult("ssh", True, f"{_all(answers)} answer")


def odd_ones(found: Mapping[str, str]) -> tuple[str, list[str], list[str]]:
    """Return the most frequent value, the hosts with the value "missing", and the hosts with another value."""
    usual = max(found.values(), key=list(found.values()).count)
    lacking = [host for host, value in found.items() if value == "missing"]
    return usual, lacking, [host for host, value in found.items() if value not in (usual, "missing")]


def check_versions(facts: Facts) -> CheckResult:
    """Check that every host has the packages and mpirun, in the same versions."""
    kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "Python": lambda said: str(said["python"]),
        "mpirun": lambda said: str(said["mpi"]),
        **{name: lambda said, name=name: str(said["versions"][name]) for name in PACKAGES},  # type: ignore[misc]
    }
    parts = []
    for kind, of in kinds.items():
        found = {name: of(said) for name, said in facts.items()}
        usual, lacking, others = odd_ones(found)
        parts += [f"no {kind} on {', '.join(lacking)}"] if lacking else []
        parts += [f"{kind} {usual}, but {', '.join(f'{name} {found[name]}' for name in others)}"] if others else []
    if parts:
        remedy = "run `make setup` there, or share one environment between the nodes"
        return CheckResult("versions", False, "; ".join(parts), remedy)
    return CheckResult("versions", True, f"{_all(facts)} alike")


def check_same(name: str, found: Mapping[str, str], *, remedy: str) -> CheckResult:
    """Check that all hosts have the same value, and that it is not "missing"."""
    _, lacking, others = odd_ones(found)
    if lacking:
        return CheckResult(name, False, f"missing on {', '.join(lacking)}", f"{remedy} there, or share it")
    if others:
        return CheckResult(name, False, f"different on {', '.join(others)}", f"{remedy} on all nodes")
    return CheckResult(name, True, f"{_all(found)} alike")


def check_cache_directory(facts: Facts, *, directory: str) -> CheckResult:
    """Check that every host could write 1 MiB to `directory`."""
    bad = [f"{name}: {said['cache']}" for name, said in facts.items() if said["cache"]]
    if bad:
        remedy = "free some space there, or choose another --cache-dir"
        return CheckResult("cache directory", False, f"{directory}: {'; '.join(bad)}", remedy)
    return CheckResult("cache directory", True, f"{directory} is writable")


def check_data_directory(facts: Facts, *, directory: str) -> CheckResult:
    """Check that every host sees the same names under `directory`."""
    found = {name: str(said["data"]) for name, said in facts.items()}
    bad = [f"{name}: {value.removeprefix('error: ')}" for name, value in found.items() if value.startswith("error: ")]
    if bad:
        value = f"{directory}: {'; '.join(bad)}"
        return CheckResult("data directory", False, value, "copy the data there, or share it")
    return check_same("data directory", found, remedy=f"put the same {directory}")


def check_ports(facts: Facts, hosts: Sequence[Host], *, ports: list[int]) -> CheckResult:
    """Check that every host has as many free ports in the range as its ranks and their daemon need."""
    span = f"{ports[0]}-{ports[1]}"
    used = {name: list(said["used_ports"]) for name, said in facts.items()}
    words = [f"{name}: {', '.join(map(str, taken[:5]))} in use" for name, taken in used.items() if taken]
    few = [host for host in hosts if ports[1] - ports[0] + 1 - len(used[host.name]) < 2 * host.slots + 1]
    if few:
        wanted = max(2 * host.slots + 1 for host in few)
        value = "; ".join([*words, f"too few free ports on {', '.join(host.name for host in few)}"])
        remedy = f"HVFREEZE_PORTS must have {wanted} free ports on each host"
        return CheckResult("ports", False, f"{span}: {value}", remedy)
    remedy = "the other ports of the range are used instead" if words else ""
    return CheckResult("ports", True, f"{span}: {'; '.join(words) or 'free'}", remedy)


def check_clock(answers: Mapping[str, Answer]) -> CheckResult:
    """Check that every host's clock agrees with this one's, up to the time of question and answer."""
    off = []
    for name, answer in answers.items():
        early, late = answer.asked - float(answer.facts["time"]), float(answer.facts["time"]) - answer.answered
        if max(early, late) > CLOCK_SECONDS:
            off.append(f"{name} is {max(early, late):.0f} s {('behind' if early > late else 'ahead')}")
    remedy = "training is not affected, but file times and logs are; run an NTP client there" if off else ""
    return CheckResult("clock", True, "; ".join(off) or f"{_all(answers)} within {CLOCK_SECONDS:.0f} s", remedy)


def check_slots(facts: Facts, hosts: Sequence[Host]) -> CheckResult:
    """Check that no host gets more ranks than it has cores."""
    cores = {name: int(said["cores"]) for name, said in facts.items()}
    full = [f"{h.name}: {h.slots} ranks, {plural(cores[h.name], 'core')}" for h in hosts if h.slots > cores[h.name]]
    if full:
        remedy = "set OMPI_MCA_mpi_yield_when_idle=1 (the scripts in launch/ do), or give the host fewer slots"
        return CheckResult("cores", True, "; ".join(full), remedy)
    return CheckResult("cores", True, f"{sum(cores.values())} for {plural(sum(h.slots for h in hosts), 'rank')}")


def _all(names: Mapping[str, object]) -> str:
    return f"{len(names)} host{'s' * (len(names) > 1)}"


RESNET18 = {"none": (44_726_568, 12), "fp16": (22_363_332, 12), "powersgd:4": (621_560, 15)}
"""Compression -> bytes that one of two ranks sends in a step of ResNet-18 with ten classes, and number of
allreduces."""
COMPUTE_SECONDS, HIDING_SECONDS = 0.25, 0.15
"""Seconds of a typical step, 64 images of 32 pixels on a few cores, and of its backward pass, which hides
allreduces."""


@dataclass(frozen=True)
class Link:
    """Measurements of the link from a host to the next."""

    megabits_per_second: float
    latency_seconds: float
    """One-way latency of a byte."""


Links = Mapping[tuple[str, str], Link | str]
"""Links by (sender, receiver); a text is the reason why there is none."""


def check_bandwidth(links: Links) -> CheckResult:
    """Check that every host reaches the next; a link with less than half of the fastest rate is noted."""
    if not links:
        return CheckResult("bandwidth", True, "one host")
    broken = [f"{sender} -> {receiver}: {link}" for (sender, receiver), link in links.items() if isinstance(link, str)]
    if broken:
        remedy = "open the firewall between them (HVFREEZE_PORTS limits the ports), or set HVFREEZE_INTERFACES"
        return CheckResult("bandwidth", False, "; ".join(broken), remedy)
    rates = {pair: link.megabits_per_second for pair, link in links.items() if isinstance(link, Link)}
    (sender, receiver), least = min(rates.items(), key=lambda item: item[1])
    most = max(rates.values())
    remedy = f"{sender} -> {receiver} limits the rate of every allreduce" if least < most / 2 else ""
    return CheckResult(
        "bandwidth", True, f"{least:.0f} to {most:.0f} Mbit/s, all hosts sending to the next at once", remedy
    )


def check_latency(links: Links) -> CheckResult:
    """Report the latency from a host to the next."""
    delays = [1e3 * link.latency_seconds for link in links.values() if isinstance(link, Link)]
    if not delays:
        return CheckResult("latency", True, "one host" if not links else "not measured")
    return CheckResult("latency", True, f"{min(delays):.2f} to {max(delays):.2f} ms between neighbouring hosts")


def check_job(links: Links) -> CheckResult:
    """Predict a step of ResNet-18 on these hosts; waiting for the network is noted."""
    usable = [link for link in links.values() if isinstance(link, Link)]
    if len(usable) < max(1, len(links)):
        return CheckResult("a step", True, "one host: no communication" if not links else "not known")
    seconds = {name: step_seconds(usable, *what) for name, what in RESNET18.items()}
    shown = ", ".join(f"{1e3 * taken:.0f} ms with {name}" for name, taken in seconds.items())
    value = f"predicted for ResNet-18 ({1000.0 * COMPUTE_SECONDS:.0f} ms of computation): --compression {shown}"
    waits = seconds["none"] > 1.05 * COMPUTE_SECONDS
    return CheckResult(
        "a step", True, value, "add --compression auto, which measures and chooses the compression" if waits else ""
    )


def step_seconds(links: Sequence[Link], payload_bytes: float, sums: int) -> float:
    """Return the seconds of a step whose ring allreduces run at the rate of the slowest link."""
    hosts = len(links)
    rate = 1e6 * min(link.megabits_per_second for link in links) / 8
    latency = max(link.latency_seconds for link in links)
    exchange = 2 * (hosts - 1) * (payload_bytes / hosts / rate + sums * latency)
    return COMPUTE_SECONDS + max(0.0, exchange - HIDING_SECONDS)
