"""Which networks are measured with every seed, and over what their spread is."""

from __future__ import annotations

from pathlib import Path

from analysis import communication
from analysis.communication import phase
from analysis.sweeps.presets import REDUCED
from hvfreeze.runs.reading import Run


def test_networks_that_the_answer_is_about_are_measured_with_every_seed_in_turn() -> None:
    planned = communication.runs(REDUCED)
    seeds = {run.label: [other.seed for other in planned if other.label == run.label] for run in planned}
    assert {label for label, found in seeds.items() if found == list(REDUCED.seeds)} == {
        communication.label_of(name, *network) for network in communication.REPEATED for name in communication.VARIANTS
    }
    assert all(found in ([0], list(REDUCED.seeds)) for found in seeds.values())
    assert [run.seed for run in planned] == sorted(run.seed for run in planned)


def test_several_runs_of_a_network_are_spread_over_runs_and_one_over_its_epochs(tmp_path: Path) -> None:
    epochs = [{"step": 4 * (place + 1), "seconds": {"forward": 4.0 + place}} for place in range(3)]
    slower = [{**line, "seconds": {"forward": 8.0}} for line in epochs]
    runs = [
        Run(
            name=str(place),
            directory=tmp_path,
            config={"exchange": {"compression": "none"}},
            environment={},
            metrics=tuple(lines),
            decisions=(),
            summary={},
        )
        for place, lines in enumerate((epochs, slower))
    ]
    assert (phase(runs[:1], "forward").mean, phase(runs[:1], "forward").n) == (1.375, 2)
    assert (phase(runs, "forward").mean, phase(runs, "forward").n) == ((1.375 + 2.0) / 2, 2)
