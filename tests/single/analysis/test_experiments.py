from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from analysis import adaptive, baseline, figures, scaling, static_sweep, summary, votes
from analysis.parts.ring import LATENCY, Model, Point, fit
from analysis.sweeps import experiment as sweep
from analysis.sweeps.presets import REDUCED, SMOKE
from analysis.sweeps.questions import Answer
from analysis.sweeps.results import open_results
from analysis.sweeps.rows import read_rows
from analysis.writing import paper
from hvfreeze.errors import RefusedError
from hvfreeze.ranks.reducer import BUCKET_BYTES
from tests.single.analysis.runs_material import a_vote, carried_out

pytestmark = pytest.mark.usefixtures("no_training")


def test_the_studys_speed_ups_are_those_of_its_seconds() -> None:
    for seconds, ratio in zip(paper.SECONDS_PER_EPOCH, paper.SPEED_UP):
        assert paper.SECONDS_PER_EPOCH[0] / seconds == pytest.approx(ratio, abs=0.006)
    assert paper.FULL.total / paper.ADAPTIVE.total == pytest.approx(paper.ADAPTIVE_SPEED_UP, abs=0.001)


def test_a_weighted_median_reaches_half_of_the_weight() -> None:
    assert votes.weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert votes.weighted_median([3.0, 1.0, 2.0], [5.0, 1.0, 1.0]) == 3.0
    assert votes.weighted_median([4.0, 1.0], [1.0, 1.0]) == 1.0


def test_the_median_of_the_scores_decides_with_the_runs_own_criterion() -> None:
    line = a_vote(3, 0)
    assert votes.median_cut(line, eta_max=1.0) == 2
    line["etas"][0][0] = line["etas"][1][0] = 0.9
    assert votes.median_cut(line, eta_max=1.0) == 0
    line["weights"] = [0.1, 0.1, 5.0]
    assert votes.median_cut(line, eta_max=1.0) == 2


def test_a_vote_without_scores_has_no_median() -> None:
    line = a_vote(2, 0)
    line["etas"] = [[None] * 6] * 2
    assert votes.median_cut(line, eta_max=1.0) is None


def points(model: Model, nodes: tuple[int, ...]) -> list[Point]:
    found = []
    for count in nodes:
        for bandwidth in (1e9, 2e8):
            for payload, backward in ((44e6, 0.14), (33e6, 0.05)):
                values = {"work": 0.21, "backward": backward, "payload": payload, "cores": 2}
                point = Point(variant="full", nodes=count, bandwidth=bandwidth, **values)
                found.append(dataclasses.replace(point, seconds=model.step(point)))
    return found


def test_the_scaling_model_is_found_again_from_its_own_steps_and_predicts_a_size_left_out() -> None:
    true = Model(0.8, 2e-9, 0.4)
    model = fit(points(true, (2, 3)))
    assert model.efficiency == pytest.approx(0.8, rel=0.02)
    assert model.copying == pytest.approx(2e-9, rel=0.02)
    for point in points(true, (4,)):
        assert model.step(point) == pytest.approx(point.seconds, rel=0.02)


def test_more_ranks_than_cores_take_longer_and_no_exchange_takes_less_than_none() -> None:
    model = Model(1.0, 0.0, 1.0)
    crowded, fast = points(model, (4,))[0], points(model, (2,))[0]
    assert crowded.crowd == 2.0
    assert model.step(dataclasses.replace(fast, bandwidth=1e15)) == fast.work


def test_many_nodes_pay_for_the_way_of_a_message_around_the_ring() -> None:
    wide = dataclasses.replace(
        points(Model(1.0, 0.0, 0.0), (2,))[0], bandwidth=1e15, cores=1000, payload=2.0 * BUCKET_BYTES
    )
    few, many = (Model(1.0, 0.0, 0.0).step(dataclasses.replace(wide, nodes=nodes)) for nodes in (129, 257))
    assert many - few == pytest.approx(2 * 128 * 2 * LATENCY, rel=0.01)


def test_the_left_out_size_is_not_part_of_the_fit(tmp_path: Path, no_files: None) -> None:
    results = carried_out(scaling.EXPERIMENT, REDUCED, tmp_path)
    assert {point.nodes for point in scaling.points_of(results)} == {2, 3, 4}
    assert scaling.LEFT_OUT not in scaling.FIT


def test_the_front_runs_at_the_learning_rate_that_was_best_on_held_out_samples(tmp_path: Path, no_files: None) -> None:
    results = carried_out(baseline.EXPERIMENT, REDUCED, tmp_path)
    tried = {row["lr"] for row in results.rows if row["label"].startswith("lr")}
    assert tried == set(baseline.LEARNING_RATES)
    assert {row["lr"] for row in results.rows if row["label"].startswith("epochs")} == {0.005}
    assert all(not row["validation_fraction"] for row in results.rows if not row["label"].startswith("lr"))


def test_the_others_take_the_baselines_learning_rate_and_are_drawn_against_its_front(
    tmp_path: Path, no_files: None
) -> None:
    carried_out(baseline.EXPERIMENT, REDUCED, tmp_path)
    options = sweep.parse(adaptive.EXPERIMENT, ["--results", str(tmp_path / "results")])
    assert sweep.preset_of(options, root=options.results).lr == 0.005
    results = carried_out(adaptive.EXPERIMENT, REDUCED, tmp_path)
    assert len(results.front.budgets) == len(baseline.BUDGETS)
    assert results.over_front("linear").n == 3


def test_a_cut_of_the_finer_split_on_a_boundary_of_the_coarser_is_run_once() -> None:
    assert static_sweep.fine(3) == static_sweep.coarse(3)
    assert static_sweep.fine(7) == static_sweep.coarse(5)
    assert static_sweep.fine(4) == "residual4"


@pytest.fixture
def readme(tmp_path: Path, no_files: None) -> Path:
    path = tmp_path / "README.md"
    parts = "\n".join(
        f"<!-- {part} -->\n<!-- /{part} -->" for part in ("ways", "front", "results", "bench", "network", "cache")
    )
    path.write_text(f"# x\n\n{parts}\n\nrest\n")
    carried_out(static_sweep.EXPERIMENT, REDUCED, tmp_path)
    return path


def arguments(readme: Path, *more: str) -> list[str]:
    return ["--readme", str(readme), "--results", str(readme.parent / "results"), *more]


def test_the_summary_is_what_the_results_say_and_keeps_the_rest(readme: Path) -> None:
    assert summary.main(arguments(readme, "--check")) == 3
    assert summary.main(arguments(readme)) == 0
    assert summary.main(arguments(readme, "--check")) == 0
    text = readme.read_text()
    assert text.startswith("# x\n")
    assert text.endswith("<!-- /cache -->\n\nrest\n")
    assert "n = 3" in text


def test_a_changed_cell_of_the_csv_file_fails_the_check(readme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.main(arguments(readme))
    path = readme.parent / "results/static_sweep/rows.csv"
    accuracy = read_rows(path.parent)[0]["test_accuracy"]
    path.write_text(path.read_text().replace(str(accuracy), "0.9999", 1))
    assert summary.main(arguments(readme, "--check")) == 3
    assert "rows.csv is not what the logs in runs/ say" in capsys.readouterr().err


def test_a_changed_number_in_the_readme_fails_the_check(readme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.main(arguments(readme))
    readme.write_text(readme.read_text().replace("1.00x", "9.99x"))
    assert summary.main(arguments(readme, "--check")) == 3
    assert "run python -m analysis.summary" in capsys.readouterr().err


def test_a_readme_without_its_markers_is_refused() -> None:
    for text in ("", "<!-- results -->", "<!-- /results --><!-- results -->"):
        with pytest.raises(RefusedError, match="must hold the lines"):
            summary.with_part(text, "results", "table")


@pytest.mark.skipif(not sweep.RESULTS.exists(), reason="no results are recorded yet")
def test_the_repositorys_readme_agrees_with_the_recorded_results() -> None:
    assert summary.main(["--check"]) == 0


def test_figures_are_drawn_again_from_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path / "page")
    carried_out(static_sweep.EXPERIMENT, SMOKE, tmp_path)
    carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    drawn = tmp_path / "results/adaptive/figures/cuts.svg"
    before = drawn.read_bytes()
    shutil.rmtree(drawn.parent)
    assert figures.main(["--results", str(tmp_path / "results")]) == 0
    assert drawn.read_bytes() == before
    assert "votes: no results yet" in capsys.readouterr().out
    assert open_results(tmp_path / "results", "adaptive").rows
    assert adaptive.EXPERIMENT.title in (tmp_path / "page/index.html").read_text()


def test_the_page_begins_with_all_answers_and_ends_with_those_that_are_negative(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    row = {"name": "slow", "what": "a", "ratio": 1.4, "low": 1.3, "high": 1.5, "n": 9, "bound": 1.2, "ok": False}
    wide = {**row, "name": "wide", "low": 1.1}
    bench.write_text(json.dumps([row, wide, {**row, "name": "good", "ok": True}]))
    answers = [Answer(question="A?", text="Yes.", n=3), Answer(question="B?", text="No.", n=3, negative=True)]
    assert figures.summary(answers).points == ("A? Yes.", "(negative) B? No.")
    failed, slow, uncertain = figures.failures(answers, bench).points
    assert failed == "B? No."
    assert "Benchmark slow" in slow
    assert "beyond its bound 1.2" in slow
    assert "too uncertain for its bound 1.2" in uncertain
    assert figures.failures(answers[:1], tmp_path / "absent").points == ("Nothing in these results.",)
