"""Figures of a finished run, for experiment trackers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hvfreeze.report.figures import plot_accuracy_against_time, plot_cuts, plot_phases, save_figure
from hvfreeze.runs.reading import load_run


def files_for_trackers(directory: Path) -> list[Path]:
    """Return the files of a finished run for trackers, with figures in `figures/`."""
    found = [directory / name for name in ("config.yaml", "metrics.jsonl", "decisions.jsonl", "model.yaml")]
    # A failing figure must not fail a finished run.
    with suppress(Exception):
        done = [load_run(directory)]
        (directory / "figures").mkdir(exist_ok=True)
        for name, plot in (("accuracy", plot_accuracy_against_time), ("phases", plot_phases), ("cuts", plot_cuts)):
            found.append(save_figure(plot(done), directory / "figures" / name).with_suffix(".png"))
    return [path for path in found if path.exists()]
