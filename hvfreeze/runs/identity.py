"""Whether a run that is resumed is the run that a directory holds, and goes on as that would have gone on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvfreeze.config.rules import is_downloaded, is_table
from hvfreeze.errors import RefusedError, UsageError

Settings = Mapping[str, Mapping[str, Any]]
"""A configuration as nested dicts, by section and leaf."""
OF_CACHE = ("cache_dir", "cache_limit", "cache_shared", "cache_failure")
HARMLESS = ("run_dir", "resume", "resume_inexact", "json", "quiet", "track", "data_dir", *OF_CACHE)
"""Leaves of the configuration that may differ between a run and its resumption: they never change a result."""
PATHS = ("data", "data_dir", "test_table", "cache_dir", "run_dir", "weights", "tasks")
COMPARED_OTHERWISE = ("epochs", "threads", "cache", "cache_dtype")
"""Leaves of which something else is compared: what they came to."""
FACTS = ("threads", "processor", "capability")
VERSIONS = ("torch", "torchvision", "horovod", "numpy", "hvfreeze")
"""What bits depend on beside the configuration."""


def absolute(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return a configuration whose paths mean the same in every working directory."""
    return {section: absolute_leaves(leaves) for section, leaves in settings.items()}


def absolute_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by leaf, with their paths as in `absolute`."""

    def resolved(leaf: str, value: Any) -> Any:
        is_path = leaf in PATHS and isinstance(value, str) and value != "none"
        is_path = is_path and not (leaf == "weights" and is_downloaded(value))
        is_path = is_path and (leaf != "data" or is_table(value))
        # `~` is a home where the file of the weights is opened, and a name like any other elsewhere.
        return os.path.abspath(os.path.expanduser(value) if leaf == "weights" else value) if is_path else value

    return {leaf: resolved(leaf, value) for leaf, value in leaves.items()}


def other_run(held: Settings, settings: Settings) -> list[str]:
    """Return in what `settings` are another run than the one `held`; --epochs may grow."""
    found = [
        f"{leaf}: {held.get(section, {}).get(leaf)!r} there, {value!r} here"
        for section, leaves in settings.items()
        for leaf, value in leaves.items()
        if leaf not in HARMLESS + COMPARED_OTHERWISE and held.get(section, {}).get(leaf) != value
    ]
    there, here = held["optimizer"]["epochs"], settings["optimizer"]["epochs"]
    if not isinstance(there, int) or here < there:
        found.append(f"epochs: {there} there, {here} here, which must not be fewer")
    return found


def inexact(held: Settings, settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what makes a resumption differ, in bits, from a run that never stopped.

    `held` and `before` are the configuration and environment.json's object of the run that stopped, `settings` and
    `now` those of the job that resumes it.
    """
    pairs = [("cached as", *(stored_as(tree["cache"]) for tree in (held, settings)))]
    # Another number of ranks is the checkpoint's to judge.
    if before.get("size") == now.get("size"):
        pairs += [(name, before[name], now[name]) for name in FACTS if name in before and name in now]
    pairs += [
        (f"the code of --{flag}", was[:12], (now.get("code") or {}).get(flag, "")[:12])
        for flag, was in (before.get("code") or {}).items()
    ]
    there, here = before.get("versions") or {}, now.get("versions") or {}
    pairs += [(name, there[name], here[name]) for name in VERSIONS if name in there and name in here]
    return [f"{name}: {was} there, {is_} here" for name, was, is_ in pairs if was != is_]


def stored_as(cache: Mapping[str, Any]) -> str:
    """Return how activations come back from the cache: exactly, however that is asked for, or rounded."""
    exact = cache["cache"] == "off" or cache["cache_dtype"] == "native"
    return "exact values" if exact else f"{cache['cache_dtype']} ({cache['cache']})"


def changes(
    held: Settings, settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any], *, place: str
) -> list[str]:
    """Return what a resumption changes on purpose, to be recorded and said.

    Raises UsageError where --resume was not given, RefusedError where it is another run, or going on would not be
    exact and --resume-inexact was not given.
    """
    run = settings["run"]
    if not run["resume"]:
        raise UsageError(f"--run-dir ({place}) holds a run; continue it with --resume, or choose another --run-dir")
    held, settings = absolute(held), absolute(settings)
    others = other_run(held, settings)
    if others:
        raise RefusedError(
            f"--resume: {place} holds another run ({'; '.join(others)}); give what it began with, as flags that are "
            "left out do, or choose another --run-dir"
        )
    rounded = inexact(held, settings, before, now)
    if rounded and not run["resume_inexact"]:
        raise RefusedError(
            f"--resume: {place} cannot go on bit for bit ({'; '.join(rounded)}); restore that, "
            "or add --resume-inexact to go on all the same, which is recorded"
        )
    there, here = held["optimizer"]["epochs"], settings["optimizer"]["epochs"]
    return rounded + ([f"epochs: {there} there, {here} here"] if here > there else [])
