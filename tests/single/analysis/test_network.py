"""What is said of the networks follows from the rows that are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import communication, exchange, growth, network
from analysis.network import row_of
from analysis.parts import clock_tables
from analysis.parts.networks.step_times import phase
from analysis.parts.networks.tables import ALONE, NETWORKS, WAYS, table, verdicts
from analysis.sweeps import kept
from analysis.sweeps.kept import RESULTS, publish, texts_of
from analysis.sweeps.presets import REDUCED
from hvfreeze.runs.reading import Run
from tests.single.analysis.runs_material import carried_out
from tests.single.analysis.test_results import recorded


def rows(**parts: float) -> list[dict[str, str]]:
    """100 images a second a node by all ways on every network, but for the parts that are given."""
    return [
        {
            "nodes": str(nodes),
            "bandwidth": limit,
            "way": way,
            "part": str(parts.get(f"{way} {nodes} {limit}", 1.0)),
            "images_per_second": str(100.0 * nodes * parts.get(f"{way} {nodes} {limit}", 1.0)),
        }
        for nodes, limit in NETWORKS
        for way in WAYS
    ]


def test_a_part_of_as_many_nodes_and_who_was_faster_are_said() -> None:
    found = rows(
        **{
            "auto 2 1gbit": 0.9,
            "auto 4 200mbit": 0.25,
            "Horovod fp16 4 200mbit": 0.26,
            "nothing sent 2 200mbit": 0.8,
            "nothing sent 2 200mbit, 100us": 0.5,
        }
    )
    said = verdicts(found)
    assert "| 1 Gbit/s | 90 % | 90 % |" in said
    assert "| 200 Mbit/s | 100 % | 125 % | 100 % | 200 % | 25 % |" in said
    assert said.endswith(
        "Faster than `auto`: Horovod fp16 on 4 nodes at 200 Mbit/s, 2 nodes at 1 Gbit/s; DDP + PowerSGD on 4 nodes at "
        "200 Mbit/s, 2 nodes at 1 Gbit/s."
    )
    assert "neither" in verdicts(rows())
    assert "| 2 | 1gbit | 200 | 200 (1.00) | 180 (0.90) |" in table(found)


def test_a_way_is_held_against_one_node_in_the_same_round() -> None:
    rounds = {ALONE: [[2.0, 1.0, 1.0], [2.0], [3.0]], "fp16": [[1.25], [2.0, 9.0, 2.5], [2.0, 2.0]]}
    row = row_of(2, "1gbit", "fp16", rounds, {})
    assert (row["part"], row["lowest_part"], row["highest_part"]) == (0.8, 0.8, 1.5)
    assert (row["steps"], row["step_seconds"], row["images_per_second"]) == (6, 2.0, 64.0)
    alone = row_of(2, "1gbit", ALONE, rounds, {})
    assert (alone["part"], alone["images_per_second"]) == (1.0, 32.0)


def test_nothing_is_said_while_rows_are_missing() -> None:
    assert verdicts(rows()[:-1]) == ""
    assert verdicts([]) == ""


def test_networks_that_the_answer_is_about_are_measured_with_every_seed_in_turn() -> None:
    planned = communication.runs(REDUCED)
    seeds = {run.label: [other.seed for other in planned if other.label == run.label] for run in planned}
    assert {label for label, found in seeds.items() if found == list(REDUCED.seeds)} == {
        communication.label_of(name, *network) for network in communication.REPEATED for name in communication.VARIANTS
    }
    assert all(found in ([0], list(REDUCED.seeds)) for found in seeds.values())
    assert [run.seed for run in planned] == sorted(run.seed for run in planned)


@pytest.mark.usefixtures("no_training", "no_files")
def test_intervals_over_the_epochs_of_one_run_are_told_as_such(tmp_path: Path) -> None:
    results = carried_out(communication.EXPERIMENT, replace(REDUCED, seeds=(0,)), tmp_path)
    (answer,) = communication.answers(results)
    assert answer.n == 1 and communication.ONE_RUN in answer.details
    assert communication.ONE_RUN not in communication.answers(recorded("communication"))[0].details


@pytest.mark.parametrize(
    ("main", "name"),
    [
        (network.main, "network"),
        (exchange.main, "exchange"),
        (lambda words: growth.main([*words, "--preset", "full", "--rows", "1000"]), "growth"),
        (
            lambda words: publish(
                Path(words[1]) / "README.md", clock_tables.readme(texts_of(Path(words[1], "rows.csv")))
            ),
            "clock",
        ),
    ],
    ids=["network", "exchange", "growth", "clock"],
)
def test_a_page_names_the_machines_of_its_rows_wherever_it_is_written(
    main: Callable[[list[str]], object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {"processor": "Other", "cores": 1, "versions": {"torch": "0", "horovod": "0"}}
    monkeypatch.setattr(kept, "facts_of_this_rank", lambda: nowhere)
    for path in (RESULTS / name).iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    assert not main(["--out", str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    assert page == (RESULTS / name / "README.md").read_text()
    rows = [{"machine": "A"}, {"machine": ""}, {}, {"machine": "A"}]
    assert kept.machines_of(rows, unstamped="B") == "A; B"


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
