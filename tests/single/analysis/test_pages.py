"""The numbers of README.md, of docs/ and of the results' pages follow from the results."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from analysis import adaptive, communication, exact_head, figures, pixels64, static_sweep, summary
from analysis.experiments import EVERY
from analysis.parts import cached_epochs, machines, readme
from analysis.sweeps import charts, paper
from analysis.sweeps.experiment import MOST_WORDS, Answer, claim, entry, is_complete
from analysis.sweeps.experiment import readme as page
from analysis.sweeps.kept import RESULTS, read_lines, read_rows
from analysis.sweeps.presets import SMOKE
from analysis.sweeps.results import BY_STEPS, Results, open_results
from analysis.sweeps.statistics import Interval, is_below
from hvfreeze.errors import RefusedError
from tests.single.analysis.runs_material import carried_out
from tests.single.analysis.test_results import recorded

pytestmark = pytest.mark.usefixtures("no_training")
SMALL = dataclasses.replace(SMOKE, seeds=(0, 1, 2))
NAN = float("nan")
MOST_SERIES = 6


def test_the_repositorys_pages_agree_with_the_recorded_results() -> None:
    assert summary.main(["--check"]) == 0


@pytest.mark.parametrize(
    "experiment", [each for each in EVERY if is_complete(RESULTS / each.name)], ids=lambda experiment: experiment.name
)
def test_every_experiments_page_is_what_its_results_say(experiment: figures.Experiment) -> None:
    results = open_results(RESULTS, experiment.name, experiment.reference)
    drawings = experiment.drawings(results)
    captions = {drawing.name: drawing.caption for drawing in drawings}
    for drawing in drawings:
        assert_readable(drawing.figure, drawing.name)
    assert page(experiment, results, captions) == (results.directory / "README.md").read_text(encoding="utf-8")
    drawn = {path.name for path in (results.directory / "figures").iterdir()}
    assert drawn == {f"{name}.svg" for name in captions}


def assert_readable(figure: Figure, name: str) -> None:
    """At most six series, letters that a phone shows, and the one colour of a method."""
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


INTERVAL = re.compile(r"\([^()]* to [^()]*\)")
PART = re.compile(r"<!-- (\S+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)


@pytest.mark.parametrize(
    "experiment", [each for each in EVERY if is_complete(RESULTS / each.name)], ids=lambda experiment: experiment.name
)
def test_every_answer_is_a_claim_that_a_reader_takes_in_at_once(experiment: figures.Experiment) -> None:
    for answer in experiment.answers(open_results(RESULTS, experiment.name, experiment.reference)):
        assert_short(answer.text)


@pytest.mark.parametrize("page", sorted(summary.pages(summary.README)), ids=lambda path: path.stem)
def test_every_generated_claim_of_a_page_is_short(page: Path) -> None:
    for name, part in PART.findall(page.read_text(encoding="utf-8")):
        text = re.sub(r"\]\([^)]*\)", "]", part)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        for cell in (cell for row in rows for cell in row.strip("| ").split(" | ")):
            assert_short(cell.removeprefix("**(negative)** "), name)
        prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        for block in re.split(r"\n\n|\n(?=- )", prose):
            for sentence in re.split(r"(?<=[.?])\*{0,2}\s+", block.replace("**(negative)**", "")):
                assert_short(sentence, name)


def assert_short(text: str, where: str = "") -> None:
    """A claim has one number with an interval, or two that are held against each other."""
    words = text.split()
    assert len(words) <= MOST_WORDS, f"{where}: {len(words)} words: {text}"
    assert len(INTERVAL.findall(text)) <= 2, f"{where}: {text}"


def test_a_comparison_of_times_of_unlike_machines_says_so(tmp_path: Path) -> None:
    row = {"run": "a", "label": "a", "seed": 0, "train_seconds": 2.0, "test_accuracy": 0.5}
    other = {**row, "run": "b", "label": "b", "train_seconds": 1.0}
    here, there = {"processor": "EPYC", "cores": 2}, {"processor": "EPYC", "cores": 4}

    def shown(*rows: dict[str, object]) -> str:
        return Results(tmp_path, list(rows)).gain_text("b", "a", count=True)

    assert shown({**row, **here}, {**other, **here}) == "2.00x (n = 1)"
    assert shown({**row, **here}, {**other, **there}) == "2.00x (n = 1; other machine)"
    assert shown({**row, **here, "timed_by": BY_STEPS}, {**other, **here}) == "2.00x (n = 1; steps against clock)"
    assert Results(tmp_path, [{**row, **here}, {**other, **there}]).gain_text("b", "a") == "2.00x (other machine)"


def test_the_table_of_machines_counts_every_kept_run() -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in machines.table(RESULTS).splitlines()
        if " Linux " in line or "| not kept |" in line
    ]
    # A file of step costs counts once for each machine that it has rounds of.
    costs = 0
    for path in RESULTS.glob("step_costs/*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        stamps = [kept["stamps"].get(name, kept) for name in kept["seconds"]]
        costs += len({(stamp["processor"], stamp["cores"]) for stamp in stamps})
    lines = sum(len(read_lines(path)) for path in RESULTS.glob("*/runs.jsonl"))
    assert sum(int(row[4]) for row in rows) == lines + costs
    assert len({tuple(row[:3]) for row in rows}) == len(rows) >= 2


@pytest.fixture
def pages(tmp_path: Path, no_files: None) -> Path:
    path = tmp_path / "README.md"
    parts = (*summary.OF_EXPERIMENTS, *readme.PARTS)
    path.write_text("\n".join(["# x", *(f"<!-- {part} -->\n<!-- /{part} -->" for part in parts), "z"]))
    carried_out(exact_head.EXPERIMENT, SMALL, tmp_path)
    return path


def arguments(pages: Path, *more: str) -> list[str]:
    return ["--readme", str(pages), "--results", str(pages.parent / "results"), *more]


def test_the_summary_is_what_the_results_say_and_keeps_the_rest(
    pages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary.main(arguments(pages, "--check")) == 3
    assert summary.main(arguments(pages)) == 0
    assert summary.main(arguments(pages, "--check")) == 0
    text = pages.read_text()
    assert text.startswith("# x\n") and text.endswith("-->\nz") and "static_sweep" not in text
    pages.write_text(text.replace("n = 3", "n = 4", 1))
    assert summary.main(arguments(pages, "--check")) == 3
    assert "run python -m analysis.summary" in capsys.readouterr().err
    path = pages.parent / "results/exact_head/rows.csv"
    accuracy = read_rows(path.parent)[0]["test_accuracy"]
    path.write_text(path.read_text().replace(str(accuracy), "0.9999", 1))
    assert summary.main(arguments(pages, "--check")) == 3
    assert "rows.csv is not what runs.jsonl says" in capsys.readouterr().err


def test_rows_that_a_cut_off_sweep_has_left_out_are_missed(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pages.parent / "results/exact_head/rows.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    assert summary.main(arguments(pages)) == 3
    said = capsys.readouterr().err
    assert "lacks 2 runs of runs.jsonl" in said and "run python -m analysis.exact_head again" in said


def test_a_part_may_stand_in_a_page_of_docs_but_once_only(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = pages.read_text()
    inner = pages.parent / "docs/inner/results.md"
    inner.parent.mkdir(parents=True)
    marks = "<!-- results -->\n<!-- /results -->"
    inner.write_text(f"before\n{marks}\nafter")
    assert summary.main(arguments(pages)) == 3
    assert "<!-- results --> must stand once in README.md and the pages of docs/; found in" in capsys.readouterr().err
    pages.write_text(text.replace(marks, ""))
    assert summary.main(arguments(pages)) == 0
    assert "](../../analysis/results/exact_head/README.md)" in inner.read_text()
    assert "](analysis/results" not in inner.read_text()
    inner.write_text("before")
    assert summary.main(arguments(pages, "--check")) == 3
    assert "found in: none" in capsys.readouterr().err
    with pytest.raises(RefusedError, match="must be followed by <!-- /results -->"):
        summary.with_part("<!-- /results --><!-- results -->", "results", "table")


def test_figures_are_drawn_again_from_what_is_kept_and_elsewhere_leave_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path / "page")
    results = carried_out(adaptive.EXPERIMENT, SMOKE, tmp_path)
    drawn = results.directory / "figures/cuts.svg"
    before = drawn.read_bytes()
    drawn.unlink()
    assert figures.main(["--results", str(tmp_path / "results")]) == 0
    assert drawn.read_bytes() == before
    assert "baseline: no results yet" in capsys.readouterr().out
    assert adaptive.EXPERIMENT.title in (tmp_path / "page/index.html").read_text()
    (results.directory / "README.md").write_text("by hand")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")}
    assert figures.main(["--results", str(tmp_path / "results"), "--out", str(tmp_path / "other")]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")} == files
    assert (tmp_path / "other/adaptive/figures/cuts.svg").read_bytes() == before


def test_the_page_begins_with_all_answers_and_ends_with_those_that_are_negative(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    row = {"name": "slow", "what": "a", "ratio": 1.4, "low": 1.3, "high": 1.5, "n": 9, "bound": 1.2, "ok": False}
    wide = {**row, "name": "wide", "low": 1.1}
    bench.write_text(json.dumps([row, wide, {**row, "name": "good", "ok": True}]))
    answers = [Answer(question="A?", text="Yes.", n=3), Answer(question="B?", text="No.", n=3, negative=True)]
    assert figures.summary(answers).points == ("A? Yes.", "(negative) B? No.")
    failed, slow, uncertain = figures.failures(answers, bench).points
    assert failed == "B? No."
    assert "Benchmark slow" in slow and "beyond its bound 1.2" in slow
    assert "too uncertain for its bound 1.2" in uncertain
    assert figures.failures(answers[:1], tmp_path / "absent").points == ("Nothing in these results.",)


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


def test_an_undecided_answer_is_marked_as_such_and_a_negative_one_before_it() -> None:
    answer = Answer(question="A?", text="b", n=3, undecided=True)
    assert claim(answer) == "- **(no answer yet)** **A?** b"
    assert entry(dataclasses.replace(answer, details=("c", "d"))) == f"{claim(answer)}\n    - c\n    - d"
    assert dataclasses.replace(answer, negative=True).mark == "negative"
    assert dataclasses.replace(answer, undecided=False).mark == ""


def test_the_network_is_held_against_one_node_by_images_a_second() -> None:
    answer = communication.answers(recorded("communication"))[0]
    assert not answer.negative
    assert "1194 images/s (1036 to 1407, n = 5), one node 782 images/s" in answer.text
    assert "In full two nodes train 253 images/s (245 to 261), one node 267 images/s" in answer.details[0]
    steps = ("frozen-cached-powersgd 107 ms", "powersgd 267 ms", "frozen-cached 361 ms", "full 506 ms")
    places = [answer.details[-1].index(told) for told in steps]
    assert places == sorted(places)


def test_leads_over_the_front_stand_in_the_answers() -> None:
    results = recorded("adaptive")
    for label in adaptive.WITHOUT_SIGNAL:
        assert f"{label} {results.lead_text(label)}" in " ".join(adaptive.answers(results)[0].details)
    assert "trained for as many seconds" in pixels64.answers(recorded("pixels64"))[0].text


def test_the_pages_tell_the_clocks_from_the_programs_own_account() -> None:
    results, told = recorded("caching"), readme.cache(RESULTS)
    assert "5.18 s (3.22 to 7.13, n = 3)" in told and "6.34 s (5.77 to 6.90, n = 3)" in told
    assert cached_epochs.by_account(results, "cut4-on").n == 3
    assert cached_epochs.by_account(results, "voted-auto").n == 1, "of runs that stored something"
    assert cached_epochs.by_account(results, "views4").n == 3, "no clocks stand beside it"
    assert cached_epochs.saved_by_clocks(results, "views4").n == 0
    assert cached_epochs.saved_by_clocks(results, "float16").n == 3


def test_the_front_in_the_pages_is_sorted_by_what_the_intervals_show() -> None:
    rows = [line.strip("| ").split(" | ") for line in readme.front(RESULTS).splitlines() if "pixels" not in line]
    rows = [row for row in rows if len(row) == 4 and row[0].isdigit()]
    for row in rows:
        low, high = (float(end) for end in row[3].rsplit("(", 1)[1].rstrip(")").split(" to "))
        assert row[1] == ("ahead" if low > 0 else "behind" if high < 0 else "no difference shown"), row
    order = ("ahead", "no difference shown", "behind")
    assert [(int(row[0]), order.index(row[1])) for row in rows] == sorted(
        (int(row[0]), order.index(row[1])) for row in rows
    )
    assert len(rows) >= 15


def test_the_studys_speed_ups_are_those_of_its_seconds() -> None:
    for seconds, ratio in zip(paper.SECONDS_PER_EPOCH, paper.SPEED_UP):
        assert paper.SECONDS_PER_EPOCH[0] / seconds == pytest.approx(ratio, abs=0.006)
    assert paper.FULL.total / paper.ADAPTIVE.total == pytest.approx(paper.ADAPTIVE_SPEED_UP, abs=0.001)


def test_a_cut_of_the_finer_split_on_a_boundary_of_the_coarser_is_run_once() -> None:
    assert [static_sweep.fine(cut) for cut in (3, 7, 4)] == ["groups3", "groups5", "residual4"]
