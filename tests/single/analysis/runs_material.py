"""Stands in for training in tests of the experiments: run directories with made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from analysis.sweeps.experiment import Experiment
from analysis.sweeps.launching import Site
from analysis.sweeps.presets import PlannedRun, Preset
from analysis.sweeps.results import Results
from analysis.sweeps.sweep import carry_out
from tests.single.report.run_directories import vote, write_run

FAST = {
    "coherence": 1.0,
    "none": 1.0,
    "auto": 8.0,
    "static": 1.5,
    "gradient-norm": 1.2,
    "percentile": 1.3,
    "linear": 1.3,
    "geometric": 1.4,
}


def fail(command: object, log: Path, *, timeout: float) -> int:
    """Stands in for `launching.follow`: the command fails, with a last line in its log."""
    log.write_text("no memory\n")
    return 1


def made_up(planned: PlannedRun, site: Site, *, timeout: float = 0.0) -> Path:
    """Writes the run directory that such a run might have left."""
    run_dir = site.work / planned.name
    settings = planned.config()
    base = 0.7 + 0.01 * planned.seed - (0.002 * (settings.freeze.cut or 0))
    accuracies = [base + 0.02 * epoch for epoch in range(min(settings.optimizer.epochs, 6))]
    voting = settings.freeze.votes
    flags: dict[str, Any] = {**planned.flags, "seed": planned.seed, "epochs": len(accuracies)}
    write_run(
        run_dir,
        accuracies=accuracies,
        speed=FAST[settings.freeze.freeze] * (1 + 0.01 * planned.seed) / planned.ranks**0.5,
        size=planned.ranks,
        decisions=[a_vote(planned.ranks, planned.seed)] if voting else [],
        **flags,
    )
    if planned.nodes > 1:
        sent = {str(epoch): {"node0": 1000 * epoch, "node1": 900 * epoch} for epoch in (1, 2, len(accuracies))}
        (run_dir / "wire.json").write_text(json.dumps(sent))
    return run_dir


def a_vote(ranks: int, seed: int) -> dict[str, Any]:
    """A vote among six blocks in which rank 0 wants more than the others."""
    etas = [[0.1 + 0.01 * rank, 0.2, 0.3, 0.4, 0.5, None] for rank in range(ranks)]
    proposals = [2, *[1] * (ranks - 1)]
    more = {"criterion": "percentile", "etas": etas, "shadow": {}}
    return vote(15 + seed, before=0, after=1, proposals=proposals, weights=[1.0] * ranks, **more)


def carried_out(experiment: Experiment, preset: Preset, folder: Path) -> Results:
    """Runs the whole experiment with `made_up` in place of training; the caller has put it there."""
    assert carry_out(experiment, preset, Site(work=folder / "work"), root=folder / "results") == 0
    return experiment.open(folder / "results")
