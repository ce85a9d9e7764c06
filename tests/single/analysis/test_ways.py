"""The figure of all ways, and what README says of it."""

from __future__ import annotations

import pytest

from analysis.parts.peers.answers import WORDS, by_samples
from analysis.parts.peers.labels import cell_of
from analysis.parts.peers.times import timed
from analysis.parts.readme import COMPARISONS, milliseconds, ways
from analysis.peers import PEERS
from analysis.sweeps.experiment import RESULTS
from analysis.sweeps.results import open_results
from analysis.sweeps.statistics import Interval
from analysis.writing.ways import Way, ways_chart

POINT = (Interval(1.0, 0.9, 1.1, 3), Interval(0.5, 0.4, 0.6, 3))


def test_a_way_looks_alike_in_every_panel_and_is_named_once() -> None:
    panels = {
        "few": [Way("full", [POINT, POINT]), Way("solved", [POINT])],
        "many": [Way("full", [POINT]), Way("other", [POINT]), Way("solved", [POINT])],
    }
    figure = ways_chart(panels, reference="full", ours=("solved",))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full", "solved", "other"]
    for label in ("full", "solved"):
        looks = [
            (lines[0].get_color(), lines[0].get_marker())
            for axes in figure.axes
            for handle, name in zip(*axes.get_legend_handles_labels())
            if name == label
            for lines in [handle.lines]
        ]
        assert len(looks) == 2 and looks[0] == looks[1]


def test_every_way_has_a_name_for_readers() -> None:
    assert WORDS.keys() == PEERS.keys()


@pytest.mark.parametrize("name", COMPARISONS)
def test_what_was_kept_has_times_and_readme_names_each_number_of_samples(name: str) -> None:
    results = open_results(RESULTS, name)
    assert all(row["train_seconds"] > 0 for row in timed(results).rows)
    told = ways(RESULTS)
    for samples, own in by_samples(results):
        assert any(cell_of(label).peer == "auto" for label in own.labels)
        size = own.rows[0]["image_size"]
        network = ", mobilenet_v3_small" if name == "peers_mobilenet" else ""
        assert f"- [{samples} images at {size} pixels{network}](analysis/results/{name}/README.md): " in told


def test_a_benchmark_tells_its_time_also_where_the_time_cap_ended_it() -> None:
    told = "a step, cut 1, against the same by hand; 12.30 ms against 11.00 ms"
    assert milliseconds(told) == milliseconds(f"{told}; the time cap ended it") == "12.30 ms"
