"""What the links between hosts are like, and what a job makes of them: pure functions to a `CheckResult`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvfreeze.doctor.checks import CheckResult

RESNET18 = {"none": (44_726_568, 12), "fp16": (22_363_332, 12), "powersgd:4": (621_560, 15)}
"""Compression -> bytes that a rank of two hands over in a step of ResNet-18 with ten classes, and in how many sums."""
COMPUTE_SECONDS, HIDING_SECONDS = 0.25, 0.15
"""A step that a few cores compute, 64 images of 32 pixels, and the backward pass in it, behind which sums travel."""


@dataclass(frozen=True)
class Link:
    """What was measured from a host to the next."""

    megabits_per_second: float
    latency_seconds: float
    """Of a byte, one way."""


Links = Mapping[tuple[str, str], Link | str]
"""By (sender, receiver); text says why there is none."""


def check_bandwidth(links: Links) -> CheckResult:
    """Check that every host reaches the next; a link at less than half of the fastest is noted."""
    if not links:
        return CheckResult("bandwidth", True, "one host")
    broken = [f"{sender} -> {receiver}: {link}" for (sender, receiver), link in links.items() if isinstance(link, str)]
    if broken:
        remedy = "open the firewall between them (HVFREEZE_PORTS limits the ports), or set HVFREEZE_INTERFACES"
        return CheckResult("bandwidth", False, "; ".join(broken), remedy)
    rates = {pair: link.megabits_per_second for pair, link in links.items() if isinstance(link, Link)}
    (sender, receiver), least = min(rates.items(), key=lambda item: item[1])
    most = max(rates.values())
    remedy = f"{sender} -> {receiver} slows every allreduce down to its rate" if least < most / 2 else ""
    return CheckResult("bandwidth", True, f"{least:.0f} to {most:.0f} Mbit/s, all sending to the next at once", remedy)


def check_latency(links: Links) -> CheckResult:
    """Tell how long a byte takes from a host to the next."""
    delays = [1e3 * link.latency_seconds for link in links.values() if isinstance(link, Link)]
    if not delays:
        return CheckResult("latency", True, "one host" if not links else "not measured")
    return CheckResult("latency", True, f"{min(delays):.2f} to {max(delays):.2f} ms from a host to the next")


def check_job(links: Links) -> CheckResult:
    """Tell what a step of ResNet-18 would take on these hosts; what waits for the network is noted."""
    usable = [link for link in links.values() if isinstance(link, Link)]
    if len(usable) < max(1, len(links)):
        return CheckResult("a step", True, "one host: nothing to exchange" if not links else "not known")
    seconds = {name: step_seconds(usable, *what) for name, what in RESNET18.items()}
    shown = ", ".join(f"{1e3 * taken:.0f} ms with {name}" for name, taken in seconds.items())
    value = f"ResNet-18 that computes {1e3 * COMPUTE_SECONDS:.0f} ms: --compression {shown}"
    waits = seconds["none"] > 1.05 * COMPUTE_SECONDS
    return CheckResult("a step", True, value, "add --compression auto, which measures and chooses" if waits else "")


def step_seconds(links: Sequence[Link], payload_bytes: float, sums: int) -> float:
    """Return the seconds of a step whose sums go round the hosts, one link as good as the slowest."""
    hosts = len(links)
    rate = 1e6 * min(link.megabits_per_second for link in links) / 8
    latency = max(link.latency_seconds for link in links)
    exchange = 2 * (hosts - 1) * (payload_bytes / hosts / rate + sums * latency)
    return COMPUTE_SECONDS + max(0.0, exchange - HIDING_SECONDS)
