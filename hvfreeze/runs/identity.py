"""Compares a resumed run with the run in a directory: whether it is the same, and whether it continues bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvfreeze.config.data import absolute_data
from hvfreeze.config.model import is_downloaded
from hvfreeze.errors import RefusedError, UsageError

Settings = Mapping[str, Mapping[str, Any]]
"""A configuration as nested dicts, by section and leaf."""
OF_CACHE = ("cache_dir", "cache_limit", "cache_shared", "cache_failure")
HARMLESS = ("run_dir", "resume", "resume_inexact", "json", "quiet", "track", "data_dir", *OF_CACHE)
"""Settings that may change when a run is resumed, because they never change a result."""
PATHS = ("data", "data_dir", "test_table", "cache_dir", "run_dir", "weights", "tasks")
COMPARED_OTHERWISE = ("epochs", "threads", "cache", "cache_dtype")
"""Settings that are compared by their effect."""
FACTS = ("threads", "processor", "capability")
VERSIONS = ("torch", "torchvision", "horovod", "numpy", "hvfreeze")
"""Facts besides the configuration that determine bits."""


def absolute(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return a configuration whose paths do not depend on the working directory."""
    return {section: absolute_leaves(leaves) for section, leaves in settings.items()}


def absolute_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, with absolute paths; see `absolute`."""

    def resolved(leaf: str, value: Any) -> Any:
        is_path = leaf in PATHS and isinstance(value, str) and value != "none"
        is_path = is_path and not (leaf == "weights" and is_downloaded(value))
        if leaf == "data" and is_path:
            return absolute_data(value)
        # `~` is a home where the file of the weights is opened, and a name like any other elsewhere.
        return os.path.abspath(os.path.expanduser(value) if leaf == "weights" else value) if is_path else value

    return {leaf: resolved(leaf, value) for leaf, value in leaves.items()}


def other_run(held: Settings, settings: Settings) -> list[str]:
    """Return the differences that make `settings` another run than `held`; --epochs may grow."""
    found = [
        f"{leaf}: {held.get(section, {}).get(leaf)!r} before, {value!r} now"
        for section, leaves in settings.items()
        for leaf, value in leaves.items()
        if leaf not in HARMLESS + COMPARED_OTHERWISE and held.get(section, {}).get(leaf) != value
    ]
    there, here = held["optimizer"]["epochs"], settings["optimizer"]["epochs"]
    if not isinstance(there, int) or here < there:
        found.append(f"epochs: {there} before, {here} now, which is fewer")
    return found


def inexact(held: Settings, settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences that make a resumed run differ in bits from an uninterrupted one.

    `held` and `before` are the configuration and environment.json of the interrupted run, `settings` and `now` those of
    the job that resumes it.
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
    return [f"{name}: {was} before, {is_} now" for name, was, is_ in pairs if was != is_]


def stored_as(cache: Mapping[str, Any]) -> str:
    """Return in words whether cached activations are exact or rounded."""
    exact = cache["cache"] == "off" or cache["cache_dtype"] == "native"
    return "exact values" if exact else f"{cache['cache_dtype']} ({cache['cache']})"


def changes(
    held: Settings, settings: Settings, before: Mapping[str, Any], now: Mapping[str, Any], *, place: str
) -> list[str]:
    """Return the intended changes of a resumed run, for the record and the log.

    Raises UsageError without --resume, and RefusedError if it is another run, or cannot continue exactly without
    --resume-inexact.
    """
    run = settings["run"]
    if not run["resume"]:
        raise UsageError(
            f"--run-dir ({place}) already contains a run; add --resume to continue it, or choose another --run-dir"
        )
    held, settings = absolute(held), absolute(settings)
    others = other_run(held, settings)
    if others:
        raise RefusedError(
            f"--resume: {place} contains a run with other settings ({'; '.join(others)}); pass the same values "
            "again (a flag that you leave out keeps its value), or choose another --run-dir"
        )
    rounded = inexact(held, settings, before, now)
    if rounded and not run["resume_inexact"]:
        raise RefusedError(
            f"--resume: {place} cannot continue bit for bit ({'; '.join(rounded)}); restore these, or add "
            "--resume-inexact to continue anyway (the change is recorded)"
        )
    there, here = held["optimizer"]["epochs"], settings["optimizer"]["epochs"]
    return rounded + ([f"epochs: {there} before, {here} now"] if here > there else [])
