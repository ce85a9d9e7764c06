"""What the sentences in README.md and in results/ may say, and where their numbers come from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from analysis import adaptive, communication, pixels64, scaling, summary, votes
from analysis.experiments import EXPERIMENTS
from analysis.parts import cached_epochs, readme, ring
from analysis.sweeps import experiment as sweep
from analysis.sweeps import provenance, writeup
from analysis.sweeps.front import Budget, Front
from analysis.sweeps.kept import COUNTED, kept_run
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.questions import Answer
from analysis.sweeps.results import Results, open_results
from analysis.sweeps.rows import read_rows
from analysis.sweeps.statistics import Interval, is_below, shown
from hvfreeze.runs.reading import load_run
from tests.single.analysis.runs_material import carried_out

RESULTS = sweep.RESULTS
NAN = float("nan")


pytestmark = pytest.mark.usefixtures("no_training", "no_files")


def kept(name: str) -> Results:
    experiment = next(each for each in EXPERIMENTS if each.name == name)
    return open_results(RESULTS, name, experiment.reference)


@pytest.mark.parametrize("name", [experiment.name for experiment in EXPERIMENTS])
def test_training_time_is_one_thing_in_rows_runs_and_epochs_of_every_experiment(name: str) -> None:
    results = kept(name)
    for row in results.rows[::7]:
        run = results.runs[str(row["run"])]
        raw = load_run(run.directory)
        assert row["train_seconds"] == pytest.approx(sum(row[f"seconds_{phase}"] for phase in COUNTED))
        assert row["train_seconds"] == pytest.approx(raw.train_seconds - row["seconds_checkpoint"])
        assert run.train_seconds == pytest.approx(row["train_seconds"])
        assert run.images_per_second * run.train_seconds == pytest.approx(raw.images_per_second * raw.train_seconds)
        assert sum(line["train_seconds"] for line in run.metrics) == pytest.approx(run.train_seconds, abs=1.0)


def test_checkpoints_do_not_make_equal_work_look_unequal(tmp_path: Path) -> None:
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    folder = results.runs["full-s0"].directory
    before = kept_run(folder)
    told = json.loads((folder / "summary.json").read_text())
    told["seconds"]["checkpoint"] = told["seconds"].get("checkpoint", 0.0) + 30.0
    told["train_seconds"] += 30.0
    (folder / "summary.json").write_text(json.dumps(told))
    after = kept_run(folder)
    assert after.train_seconds == pytest.approx(before.train_seconds)
    assert after.seconds["checkpoint"] == 0.0
    assert load_run(folder).seconds["checkpoint"] >= 30.0


def rows(seed: int, *, slower: float, better: float) -> list[dict[str, Any]]:
    common = {"cache": "off", "cache_bytes": 0, "augment": "fresh", "seed": seed, "epochs": 10}
    made = {"full": (20.0, 0.8), "frozen": (15.0, 0.75)}
    return [
        {**common, "label": label, "train_seconds": slower * taken, "test_accuracy": right + better}
        for label, (taken, right) in made.items()
    ]


def test_a_lead_over_the_front_is_taken_within_a_seed() -> None:
    """One seed is better throughout, and slower: neither has anything to do with freezing."""
    fronts = {
        seed: Front((Budget(10.0, 0.6 + better, epochs=5), Budget(20.0, 0.8 + better, epochs=10)))
        for seed, better in ((0, 0.0), (1, 0.1))
    }
    both = [*rows(0, slower=1.0, better=0.0), *rows(1, slower=3.0, better=0.1)]
    found = Results(Path(), both, fronts[0], fronts, "full").over_front("frozen")
    assert found.mean == pytest.approx(0.75 - 0.7)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-9)
    assert Results(Path(), both, fronts[0], {0: fronts[0]}, "full").over_front("frozen").n == 1


def test_the_recorded_lead_of_five_cached_stages_at_64_pixels_is_not_sure() -> None:
    lead = kept("pixels64").over_front("cut5-cached")
    assert lead.low < 0 < lead.high
    assert "trained for as many seconds" in pixels64.answers(kept("pixels64"))[0].text
    assert "stops after" not in summary.README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("interval", "below"),
    [
        (Interval(0.99, 0.93, 1.05, 3), False),
        (Interval(0.9, 0.85, 0.95, 3), True),
        (Interval(0.5, NAN, NAN, 1), False),
        (Interval(1.1, 1.05, 1.2, 3), False),
        (Interval(NAN, NAN, NAN, 0), False),
    ],
)
def test_negative_is_what_the_whole_interval_says(interval: Interval, below: bool) -> None:
    assert is_below(interval, 1) is below


def test_an_undecided_answer_is_marked_as_such_and_a_negative_one_before_it() -> None:
    answer = Answer(question="A?", text="b", n=3, undecided=True)
    assert writeup.claim(answer) == "- **(no answer yet)** **A?** b"
    assert dataclasses.replace(answer, negative=True).mark == "negative"
    assert dataclasses.replace(answer, undecided=False).mark == ""


def test_the_votes_answer_counts_distinct_trainings() -> None:
    results = kept("votes")
    answer = votes.answers(results)[0]
    assert len(votes.alike(results)) * 3 == 27
    assert votes.distinct(results, votes.alike(results)) == 13
    assert answer.mark == "no answer yet"
    assert "27 runs that differ in how they vote are 13 distinct trainings, of 7 votes each" in answer.text


def test_runs_that_stored_nothing_are_not_called_cached() -> None:
    results = kept("pixels64")
    assert results.shown_as("geometric-cached") == "geometric, views:2 (nothing cached)"
    assert results.shown_as("cut4-cached") == "cut4-cached"
    assert kept("caching").shown_as("voted-auto") == "voted-auto (cached in 1 of 3 runs)"
    told = pixels64.answers(results)[0].text + "".join(table.to_text() for table in pixels64.tables(results))
    assert "geometric-cached" not in told
    assert results.runs_of("geometric-cached")[1].name == "geometric, views:2 (nothing cached)-s1"


def test_the_network_is_held_against_one_node_by_images_a_second() -> None:
    answer = communication.answers(kept("communication"))[0]
    assert not answer.negative
    paces = (
        "253 images/s (245 to 261) in full, one node 267 images/s",
        "frozen and cached 354 images/s (345 to 364), one node 782 images/s (730 to 843), two with low rank 1194",
    )
    assert [told for told in paces if told not in answer.text] == []
    steps = ("frozen-cached-powersgd 107 ms", "powersgd 267 ms", "frozen-cached 361 ms", "full 506 ms")
    places = [answer.text.index(told) for told in steps]
    assert places == sorted(places)


def test_256_nodes_are_a_range_over_the_latency_that_is_assumed() -> None:
    results = kept("scaling")
    model = ring.fit([point for point in scaling.points_of(results) if point.nodes in scaling.FIT])
    full = scaling.predicted(scaling.points_of(results), "full", 256, "10gbit")
    parts = [ring.efficiency(dataclasses.replace(model, latency=latency), full) for latency in ring.LATENCIES]
    assert parts == sorted(parts, reverse=True)
    text = scaling.answers(results)[0].text
    assert f"{100 * parts[2]:.0f} % to {100 * parts[0]:.0f} % in full" in text
    assert "200 to 0 microseconds" in text and "assumed" in text


def test_the_schedules_that_look_at_nothing_stand_beside_the_votes() -> None:
    results = kept("adaptive")
    text = adaptive.answers(results)[0].text
    for label in adaptive.WITHOUT_SIGNAL:
        assert f"{label} {shown(results.over_front(label), lambda value: f'{100 * value:+.1f} points')}" in text


def test_the_readme_tells_the_clocks_from_the_programs_own_account() -> None:
    told = readme.cache(RESULTS)
    assert "by the clocks 5.18 s (3.22 to 7.13, n = 3) were" in told
    assert "by the program's own account 6.29 s" in told
    results = kept("caching")
    assert cached_epochs.saved_by_clocks(results, "views4").n == 0
    assert cached_epochs.saved_by_clocks(results, "float16").n == 3


def test_the_front_in_the_readme_is_sorted_by_what_the_intervals_show() -> None:
    lines = {line.split(":")[0]: line for line in readme.front(RESULTS).splitlines() if line.startswith("- ")}
    for name, line in lines.items():
        for part in line.split(": ", 1)[1].rstrip(".").split("; "):
            low, high = (float(end) for end in part.rsplit("(", 1)[1].rstrip(")").split(" to "))
            wanted = "ahead" if low > 0 else "behind" if high < 0 else "no difference shown"
            assert name.endswith(wanted), part
    assert len(lines) >= 5


def test_every_recorded_run_says_source_time_machine_and_versions() -> None:
    for experiment in EXPERIMENTS:
        for row in read_rows(RESULTS / experiment.name):
            told = [row[key] for key in ("commit", "finished", "stamped", "processor", "cores", *provenance.VERSIONS)]
            assert None not in told, row["run"]
