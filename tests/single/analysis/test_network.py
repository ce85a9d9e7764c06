"""What is said of the networks follows from the rows that are kept."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis import communication
from analysis.network import row_of
from analysis.parts.networks.step_times import phase
from analysis.parts.networks.tables import ALONE, NETWORKS, WAYS, kept
from analysis.sweeps.kept import told_of
from analysis.sweeps.presets import REDUCED
from hvfreeze.report.tables import to_csv
from hvfreeze.runs.reading import Run


def test_a_network_counts_when_all_its_ways_are_there(tmp_path: Path) -> None:
    rows = [{"nodes": n, "bandwidth": link, "way": way, "part": 1.0} for n, link in NETWORKS[:3] for way in WAYS]
    (tmp_path / "rows.csv").write_text(to_csv(rows[:-1]))
    found = kept(tmp_path / "rows.csv")
    assert set(zip(found["nodes"], found["bandwidth"])) == set(NETWORKS[:2]) and len(found) == 2 * len(WAYS)
    assert kept(tmp_path / "absent.csv").empty


def test_machines_and_sources_of_rows_are_told_once_each() -> None:
    rows = pd.DataFrame(
        [{"machine": "A", "commit": "x"}, {"machine": "", "commit": "y"}, {"machine": "A", "commit": "x"}]
    )
    assert told_of(rows, unstamped="B") == "A; B; source x, y"
    assert told_of(rows[["commit"]], unstamped="B") == "B; source x, y"


def test_a_way_is_held_against_one_node_in_the_same_round() -> None:
    rounds = {ALONE: [[2.0, 1.0, 1.0], [2.0], [3.0]], "fp16": [[1.25], [2.0, 9.0, 2.5], [2.0, 2.0]]}
    row = row_of(2, "1gbit", "fp16", rounds, {})
    assert (row["part"], row["lowest_part"], row["highest_part"]) == (0.8, 0.8, 1.5)
    assert (row["steps"], row["step_seconds"], row["images_per_second"]) == (6, 2.0, 64.0)
    alone = row_of(2, "1gbit", ALONE, rounds, {})
    assert (alone["part"], alone["images_per_second"]) == (1.0, 32.0)


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
