"""What is kept of a run: its small logs, without this machine's paths.

RESULTS/<experiment>/runs/<run>/    config.yaml environment.json metrics.jsonl decisions.jsonl summary.json plan.json
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from analysis.sweeps.presets import PlannedRun
from hvfreeze.errors import RefusedError

LOGS = ("config.yaml", "environment.json", "metrics.jsonl", "decisions.jsonl", "summary.json", "wire.json")
PLAN = "plan.json"


def keep(run_dir: Path, planned: PlannedRun, kept: Path) -> None:
    """Copy a finished run's small logs to the folder `kept`, complete or not at all, without this machine's paths."""
    part = kept.with_name(f".{kept.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in LOGS:
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, part / name)
    tree = yaml.safe_load((part / "config.yaml").read_text(encoding="utf-8"))
    tree["data"]["data_dir"] = None
    tree["run"]["run_dir"] = None
    tree["model"]["weights"] = Path(tree["model"]["weights"]).name
    # So that runs which differ in these alone are never taken for repetitions of each other.
    tree["sweep"] = {"program": planned.program, "nodes": planned.nodes, "bandwidth": planned.bandwidth}
    (part / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    known = json.loads((part / "environment.json").read_text(encoding="utf-8"))
    names = {host: f"host{number}" for number, host in enumerate(dict.fromkeys(known.get("hosts", [])))}
    known["hosts"] = [names[host] for host in known.get("hosts", [])]
    (part / "environment.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (part / PLAN).write_text(json.dumps(planned.identity(), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(kept, ignore_errors=True)
    os.replace(part, kept)


def is_kept(planned: PlannedRun, kept: Path) -> bool:
    """Tell whether the run's logs are there already.

    Raises:
        RefusedError: another run's logs have its name; the message shows the difference.
    """
    if not (kept / "summary.json").exists() or not (kept / PLAN).exists():
        return False
    held, asked = flat(json.loads((kept / PLAN).read_text(encoding="utf-8"))), flat(planned.identity())
    names = sorted(key for key in held | asked if held.get(key) != asked.get(key))
    if names:
        shown = "; ".join(f"{name}: {held.get(name)!r} there, {asked.get(name)!r} here" for name in names)
        raise RefusedError(f"{kept} holds another run ({shown}); remove that folder, or give another --results")
    return True


def borrow(planned: PlannedRun, directory: Path) -> bool:
    """Copy the run's logs from another experiment that has made the same run; tell whether there was one."""
    for kept in sorted(directory.parent.glob(f"*/runs/{planned.name}")):
        if (kept / "summary.json").exists() and json.loads((kept / PLAN).read_text()) == planned.identity():
            own = directory / "runs" / planned.name
            part = own.with_name(f".{own.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(kept, part)
            part.rename(own)
            return True
    return False


def flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity without its inner level."""
    return {**{key: value for key, value in identity.items() if key != "flags"}, **identity["flags"]}
