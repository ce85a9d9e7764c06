"""Measure the cost of a training step at every cut, live and cached, on 1, 2 and 4 ranks, for `analysis.peers`.

    python -m analysis.step_costs                     both image sizes, 40 minutes, into analysis/results/step_costs
    python -m analysis.step_costs --image-size 64 --ranks 2       these only, merged into what is there
    python -m analysis.step_costs --quick             only see that everything runs, into build/experiments

Accuracies of a comparison repeat exactly on any loaded machine; seconds do not. So steps are
timed here, all kinds in turns on an idle machine, and a run's training time is the sum over its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.benchmarks.launching import ROOT, environment
from analysis.parts.peers import file_of
from analysis.sweeps.kept import RESULTS, commit, publish
from analysis.sweeps.options import folder_to_write
from analysis.sweeps.sweep import SMOKE_RESULTS
from hvfreeze.errors import HvfreezeError, RefusedError
from hvfreeze.runs.environment import describe_environment, facts_of_this_rank

RANKS = (1, 2, 4)
IMAGE_SIZES = (32, 64)
BATCH_SIZES = (32, 64)
SECONDS = 40.0
"""Seconds of measurement per number of ranks, image size and batch size, in addition to the preparation."""
FACTS = ("processor", "cores", "versions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the steps and return the exit code."""
    options = parse(arguments)
    sizes = IMAGE_SIZES[:1] if options.quick else options.image_size or IMAGE_SIZES
    try:
        for image_size in sizes:
            kept = begun(file_of(options.results, image_size))
            for ranks in RANKS[1:2] if options.quick else options.ranks or RANKS:
                for rows in (8,) if options.quick else BATCH_SIZES:
                    found = timed(ranks, rows, image_size, seconds=0.0 if options.quick else SECONDS)
                    name = f"{ranks} ranks, batches of {rows}"
                    kept["seconds"][name], kept["stamps"][name] = found, {"commit": commit(), **facts()}
                    publish(file_of(options.results, image_size), json.dumps(kept, indent=1) + "\n")
                    print(f"{image_size} pixels, {ranks} ranks, batches of {rows}: {shown(found)}", flush=True)
    except HvfreezeError as error:
        print(f"step_costs: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.step_costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image-size", type=int, nargs="+", choices=IMAGE_SIZES, help="these only")
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, help="these numbers only")
    parser.add_argument("--quick", action="store_true", help="tiny batches, few steps: see that everything runs")
    parser.add_argument(
        "--results",
        type=folder_to_write,
        help=f"folder of all experiments' results [{RESULTS}; quick: {SMOKE_RESULTS}]",
    )
    options = parser.parse_args(arguments)
    options.results = options.results or (SMOKE_RESULTS if options.quick else RESULTS)
    return options


def begun(path: Path) -> dict[str, Any]:
    """Return what is kept at a path, to be added to.

    `stamps` has source and machine of each entry of `seconds`; entries without a stamp have those of the file.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"seconds": {}, "stamps": {}, **found}


def facts() -> dict[str, Any]:
    """Return the facts that the seconds depend on, apart from the source."""
    known = describe_environment([facts_of_this_rank()])
    return {name: known.get(name) for name in FACTS}


def timed(ranks: int, rows: int, image_size: int, *, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of the timed steps of each kind.

    Raises:
        RefusedError: the ranks failed.
    """
    with tempfile.TemporaryDirectory(prefix="step-costs-") as scratch:
        out = Path(scratch) / "seconds.json"
        command = [
            *("mpirun", "-n", str(ranks), "--bind-to", "none", "--oversubscribe", "--timeout", "900"),
            *(sys.executable, "-m", "analysis.parts.step_sides", "--rows", str(rows), "--image-size", str(image_size)),
            *("--seconds", str(seconds), "--scratch", scratch, "--out", str(out)),
        ]
        done = subprocess.run(command, env=environment(os.environ), cwd=ROOT, check=False)
        if done.returncode != 0 or not out.exists():
            raise RefusedError(f"{ranks} ranks that time steps ended with exit code {done.returncode}")
        found: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
    return {kind: [round(value, 6) for value in values] for kind, values in found.items()}


def shown(seconds: dict[str, list[float]]) -> str:
    """Return each kind's median in words."""
    return ", ".join(f"{kind} {1e3 * sorted(values)[len(values) // 2]:.1f} ms" for kind, values in seconds.items())


if __name__ == "__main__":
    sys.exit(main())
