"""The pages of results, and the numbers of README.md and docs/, follow from the kept runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from analysis import adaptive, caching, figures, summary
from analysis.experiments import EVERY, PAGES
from analysis.parts import guides
from analysis.sweeps import charts, pages, paper
from analysis.sweeps.kept import RESULTS, read_lines
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.results import BY_STEPS, MissingError, Results
from analysis.sweeps.statistics import Interval, is_below
from hvfreeze.errors import RefusedError
from tests.single.analysis.runs_material import carried_out

MOST_SERIES, MOST_WORDS = 7, 40
NAN = float("nan")
OFTEN = ("adaptive", "strategies", "votes", "photographs")
"""Pages whose figures are drawn each time: the front of an experiment, its own figures, and pages of no experiment."""
INTERVAL = re.compile(r"\([^()]* to [^()]*\)")


@pytest.mark.seldom  # more than a minute
def test_the_repositorys_pages_agree_with_the_recorded_results() -> None:
    assert summary.main(["--check"]) == 0


def test_a_page_that_says_something_else_is_told_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary, "PAGES", {})
    monkeypatch.setattr(summary, "parts", lambda pages: {"one": "[a](analysis/results/a/README.md) n = 3"})
    monkeypatch.setattr(summary, "README", tmp_path / "README.md")
    summary.README.write_text("before\n")
    inner = tmp_path / "docs" / "inner" / "page.md"
    inner.parent.mkdir(parents=True)
    inner.write_text("before\n<!-- one -->\nn = 4\n<!-- /one -->\nafter\n")
    assert summary.main(["--check"]) == 3
    assert "not what the results say; run python -m analysis.summary" in capsys.readouterr().err
    assert summary.main([]) == 0 == summary.main(["--check"])
    told = "[a](../../analysis/results/a/README.md) n = 3"
    assert inner.read_text() == f"before\n<!-- one -->\n{told}\n<!-- /one -->\nafter\n"
    summary.README.write_text(inner.read_text())
    assert summary.main([]) == 3 and "must stand once in README.md" in capsys.readouterr().err
    with pytest.raises(RefusedError, match="found in: none"):
        summary.guides_with({"other": ""}, summary.README)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.seldom) for name in PAGES]
)
def test_every_figure_is_readable_and_is_the_one_that_is_kept(name: str) -> None:
    drawn = PAGES[name].drawings(RESULTS)
    for title, figure in drawn.items():
        assert_readable(figure, title)
    kept = {path.stem for path in (RESULTS / name / "figures").glob("*.svg")}
    assert kept == set(drawn)
    page = (RESULTS / name / "README.md").read_text(encoding="utf-8")
    assert all(f"figures/{title}.svg" in page for title in drawn)


def assert_readable(figure: Figure, name: str) -> None:
    """Few series, letters that a phone shows, and the one colour of a method."""
    assert figure.get_figwidth() <= charts.FIGURE_WIDTH, name
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
    for legend in legends:
        assert len(legend.get_texts()) <= MOST_SERIES, name
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            if text.get_text() in charts.METHOD_COLOURS:
                line = handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle
                assert to_hex(line.get_color()) == charts.METHOD_COLOURS[text.get_text()].lower(), name


def test_no_two_methods_have_one_colour() -> None:
    colours = [*charts.METHOD_COLOURS.values(), *charts.OTHERS]
    assert len(set(colours)) == len(colours)


def test_pages_have_claims_with_n_limits_and_how_they_were_made() -> None:
    for name in PAGES:
        text = (RESULTS / name / "README.md").read_text(encoding="utf-8")
        assert "## Limits" in text and "- `python -m analysis." in text
        for _, question, answer in pages.claims(text):
            assert len(answer.split()) <= MOST_WORDS and len(INTERVAL.findall(answer)) <= 2, question
            assert "n = " in answer or " of 3 runs" in answer, question


def test_a_template_names_nothing_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    (tmp_path / "one.md").write_text("# Title\n\n- **Q?** {{ percent(x) }}, n = 3.\n{{ absent }}\n")
    with pytest.raises(Exception, match="absent"):
        pages.render("one", {"x": 0.5})
    text = pages.render("one", {"x": 0.5, "absent": "- **(negative)** **R?** no"})
    assert list(pages.claims(text)) == [("", "Q?", "50.0 %, n = 3."), ("**(negative)** ", "R?", "no")]
    assert pages.Page("one", lambda root: {}).title() == "Title"


@pytest.mark.usefixtures("no_training", "no_files")
def test_a_page_waits_until_all_runs_are_there_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    assert "adaptive: the page is not written" in capsys.readouterr().out
    assert not (results.directory / "README.md").exists()
    with pytest.raises(MissingError, match="has no runs geometric"):
        results.of("geometric")


def test_figures_go_elsewhere_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PAGES", {"baseline": PAGES["baseline"]})
    assert figures.main(["--out", str(tmp_path)]) == 0
    drawn = tmp_path / "baseline/figures/front.svg"
    assert drawn.read_bytes() == (RESULTS / "baseline/figures/front.svg").read_bytes()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["front.svg"]


def test_a_comparison_of_times_of_unlike_machines_says_so(tmp_path: Path) -> None:
    row = {"run": "a", "label": "a", "seed": 0, "train_seconds": 2.0, "test_accuracy": 0.5}
    other = {**row, "run": "b", "label": "b", "train_seconds": 1.0}
    here, there = {"processor": "EPYC", "cores": 2}, {"processor": "EPYC", "cores": 4}

    def shown(*rows: dict[str, object]) -> str:
        return Results(tmp_path, list(rows)).gain("b", "a", n=True)

    assert shown({**row, **here}, {**other, **here}) == "2.00x (n = 1)"
    assert shown({**row, **here}, {**other, **there}) == "2.00x (n = 1; other machine)"
    assert shown({**row, **here, "timed_by": BY_STEPS}, {**other, **here}) == "2.00x (n = 1; steps against clock)"
    assert Results(tmp_path, [{**row, **here}, {**other, **there}]).gain("b", "a") == "2.00x (other machine)"


def test_the_table_of_machines_counts_every_kept_run() -> None:
    rows = guides.machines(RESULTS)
    runs = [row[3].count("step_costs") for row in rows]
    lines = sum(len(read_lines(path)) for path in RESULTS.glob("*/runs.jsonl"))
    assert sum(int(row[4]) for row in rows) == lines + sum(runs) and sum(runs) >= 2
    assert len({tuple(row[:3]) for row in rows}) == len(rows) >= 2


def test_the_front_in_the_pages_is_sorted_by_what_the_intervals_show() -> None:
    rows = guides.front(RESULTS)
    for _, shows, _, points in rows:
        low, high = (float(end) for end in points.rsplit("(", 1)[1].rstrip(")").split(" to "))
        assert shows == ("ahead" if low > 0 else "behind" if high < 0 else "no difference shown")
    order = [(pixels, guides.SHOWN.index(shows)) for pixels, shows, *_ in rows]
    assert order == sorted(order) and len(rows) >= 15


@pytest.mark.parametrize(
    ("interval", "below"),
    [
        (Interval(0.99, 0.93, 1.05, 3), False),
        (Interval(0.9, 0.85, 0.95, 3), True),
        (Interval(0.5, NAN, NAN, 1), False),
        (Interval(NAN, NAN, NAN, 0), False),
    ],
)
def test_negative_is_what_the_whole_interval_says(interval: Interval, below: bool) -> None:
    assert is_below(interval, 1) is below


def test_the_pages_tell_the_clocks_from_the_programs_own_account() -> None:
    results = caching.EXPERIMENT.open(RESULTS)
    assert caching.by_account(results, "cut4-on").n == 3
    assert caching.by_account(results, "voted-auto").n == 1, "of runs that stored something"
    assert caching.by_account(results, "views4").n == 3, "no clocks stand beside it"
    assert caching.by_clocks(results, "views4").n == 0
    assert caching.by_clocks(results, "float16").n == 3


def test_the_studys_speed_ups_are_those_of_its_seconds() -> None:
    for seconds, ratio in zip(paper.SECONDS_PER_EPOCH, paper.SPEED_UP):
        assert paper.SECONDS_PER_EPOCH[0] / seconds == pytest.approx(ratio, abs=0.006)
    assert paper.FULL.total / paper.ADAPTIVE.total == pytest.approx(paper.ADAPTIVE_SPEED_UP, abs=0.001)


def test_every_experiment_has_a_page_of_its_name() -> None:
    assert {each.name for each in EVERY} <= set(PAGES)
    assert all((pages.PAGES / f"{name}.md").exists() for name in PAGES)
