"""A report: its tables, figures and page, and the command that writes it."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.__main__ import main
from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import to_dict
from hvfreeze.errors import RefusedError
from hvfreeze.report import figures
from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.figures import (
    COLOURS,
    NARROW,
    accuracy_curve,
    colours,
    plot_accuracy_against_time,
    plot_cuts,
    plot_gains,
    plot_phases,
    spread_out,
)
from hvfreeze.report.report import Section, write_page, write_report, write_report_page
from hvfreeze.report.tables import Table, command, models_table, summary_table, vote_table
from hvfreeze.runs.reading import load_run, load_runs
from tests.single.report.conftest import VOTES
from tests.single.report.run_directories import PHASES, groups_of, vote, write_run


def test_the_command_ends_with_code_3_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 3
    assert f"run directory {tmp_path / 'nowhere'} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_a_file_is_refused(pair: list[Path], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(RefusedError, match="--out"):
        write_report(pair, out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def votes_of(directory: Path) -> list[dict[str, str]]:
    table = vote_table(load_run(directory))
    return [dict(zip(table.columns, row)) for row in table.rows]


def test_a_vote_is_a_row_that_a_person_can_follow(pair: list[Path]) -> None:
    assert vote_table(load_run(pair[1])).title == "voted: 2 votes, 1 change of the cut"
    first, second = votes_of(pair[1])
    assert (first["Proposals"], first["Weights"], first["Cut"]) == ("1, 2", "1, 0.5", "0 → 1")
    assert (first["Support"], first["Quorum"]) == ("cut 1: 100.0 %, cut 2: 33.3 %", "50.0 %")
    assert (second["Cut"], second["Support"]) == ("stays 1", "cut 2: 20.0 %")


def test_ballots_of_many_ranks_are_counted_and_a_shadow_has_a_column(tmp_path: Path) -> None:
    line = vote(10, before=0, after=0, proposals=[0] * 30 + [1] * 10, weights=[1.0] * 40)
    (row,) = votes_of(write_run(tmp_path / "many", accuracies=[0.1], size=40, freeze="linear", decisions=[line]))
    assert row["Proposals"] == "30 times 0, 10 times 1"
    shadow = {"linear": {"proposals": [2, 3], "cut": 2}}
    line = vote(10, before=0, after=0, proposals=[], weights=[1.0, 1.0], shadow=shadow, tally=[], total=0)
    (row,) = votes_of(write_run(tmp_path / "watched", accuracies=[0.1], shadow="linear", decisions=[line]))
    assert (row["Shadow linear"], row["Proposals"], row["Cut"]) == ("2 (2, 3)", "", "stays 0")


def test_votes_of_a_run_that_went_on_with_fewer_ranks_are_drawn(tmp_path: Path) -> None:
    votes = [
        vote(step, before=0, after=0, proposals=[1] * ranks, weights=[1.0] * ranks)
        for step, ranks in ((10, 4), (20, 2))
    ]
    run = load_run(write_run(tmp_path / "fewer", accuracies=[0.1, 0.2], size=2, freeze="linear", decisions=votes))
    (axes,) = plot_cuts([run]).axes
    proposals = [line for line in axes.lines if str(line.get_label()).startswith("proposal")]
    assert [len(line.get_xdata()) for line in proposals] == [2, 2, 1, 1]  # type: ignore[arg-type]


def test_the_command_of_a_run_names_what_differs_from_the_defaults(pair: list[Path]) -> None:
    assert command(load_run(pair[1])) == "horovodrun -np 2 hvfreeze train --epochs 3 --freeze gradient-norm"


@pytest.mark.parametrize(
    "flags",
    [
        {"freeze": "auto", "epochs": 10},
        {"freeze": "auto", "optimizer": "adamw"},
        {"freeze": "auto", "optimizer": "sgd"},
        {"freeze": "auto", "lr": 0.001},
        {"freeze": "auto", "head": "last", "evaluate_every": 1},
        {"strategy": "stale-ring", "optimizer": "sgd"},
        {"strategy": "subnets", "momentum": 0.9},
        {"optimizer": "adamw", "lr": 0.1},
        {"data": "imagefolder", "data_dir": "my photos/it's here"},
    ],
)
def test_the_command_of_a_run_starts_that_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Whatever its defaults depend on, and however a shell reads it."""
    run = load_run(write_run(tmp_path / "run", accuracies=[0.1], size=1, **{"epochs": 16, **flags}))
    words = shlex.split(command(run))
    assert words[:2] == ["hvfreeze", "auto" if "freeze" in flags else "train"]
    assert to_dict(configuration(parse(words[1:]))) == run.config


def test_a_name_with_a_line_end_is_in_one_row_of_a_table() -> None:
    assert Table(columns=("Run",), rows=(("a\nb\x1b",),)).to_text().splitlines()[2:] == ["| a\\nb\\x1b |"]


def test_a_table_as_text_is_aligned_and_marks_its_columns() -> None:
    text = Table(columns=("a", "number"), rows=(("long name", "1"), ("b", "22"))).to_text()
    assert text == "| a         | number |\n|:----------|-------:|\n| long name |      1 |\n| b         |     22 |\n"


def test_a_report_is_a_page_figures_and_numbers_the_same_bytes_each_time_and_asks_for_nothing_else(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run's name puts no markup into the page, and no formula into a figure.
    pair = [pair[0], pair[1].rename(tmp_path / "<b>$x_{$")]
    out = tmp_path / "report"
    assert write_report(pair, out=out) == 0
    page = (out / "index.html").read_text()
    assert "<b>" not in page and "&lt;b&gt;$x_{$" in page
    for text in ("1.25x", "20.0 %", "80.0 %", "cut 1: 100.0 %, cut 2: 33.3 %", "Some CPU", "not installed"):
        assert text in page
    for name in ("accuracy-against-time", "phases", "cuts"):
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / "figures" / f"{name}.svg").read_text()
    rows, epochs, votes = (
        list(csv.DictReader((out / "data" / f"{name}.csv").read_text().splitlines()))
        for name in ("runs", "epochs", "votes")
    )
    assert [row["run"] for row in rows] == ["full", "<b>$x_{$"]
    assert float(rows[1]["speed_up"]) == pytest.approx(1.25) and rows[0]["speed_up"] == ""
    assert len(epochs) == 6
    assert [line["proposals"] for line in votes] == ["1 2", "1 2"]
    assert "<script" not in page
    linked = re.findall(r'(?:src|href|srcset)="([^"]*)"', page)
    assert linked
    for link in linked:
        assert link.startswith(("data:image/svg+xml;base64,", "#section-")) or (out / link).is_file()
    assert len([path for path in out.rglob("*") if path.is_file()]) == 16
    # One figure that is drawn again stands for all.
    figures.save_figure(plot_phases(load_runs(pair), width=figures.WIDE), tmp_path / "phases")
    for file in ("phases.png", "phases.svg"):
        assert (tmp_path / file).read_bytes() == (out / "figures" / file).read_bytes()
    monkeypatch.setattr(figures, "save_figure", lambda figure, base: out / "figures" / f"{base.name}.svg")
    write_report(pair, out=tmp_path / "again")
    for again in (tmp_path / "again").rglob("*.*"):
        assert again.read_bytes() == (out / again.relative_to(tmp_path / "again")).read_bytes(), again


def test_an_unfinished_run_is_shown_as_such_and_not_compared(tmp_path: Path) -> None:
    unfinished = {"epochs": 5, "freeze": "linear", "finished": False}
    table = summary_table(groups_of(tmp_path, {"full": {"accuracies": [0.1] * 5}, "voted": unfinished}))
    row = dict(zip(table.columns, table.rows[1]))
    assert row["Run"] == "voted (not finished: 1 of 5 epochs)"
    assert (row["Speed-up"], row["Time saved"]) == ("", "")


@pytest.mark.parametrize("flags", [{"freeze": "auto", "epochs": 6}, {"time_budget": "5m"}])
def test_of_an_unfinished_run_that_plans_as_it_goes_only_what_is_done_is_told(
    tmp_path: Path, flags: dict[str, str]
) -> None:
    runs = load_runs([write_run(tmp_path / "auto", accuracies=[0.1] * 8, finished=False, **flags)])
    assert summary_table(group_by_seed(runs)).rows[0][0] == "auto (not finished: 8 epochs)"


@pytest.mark.usefixtures("undrawn")
def test_one_run_of_one_epoch_without_votes_makes_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "only", accuracies=[0.1], size=1)
    write_report([run], out=tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "report on 1 run<" in page and "Votes and cuts" not in page


def test_many_runs_are_drawn_on_a_narrow_page(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"_run-{lr}", accuracies=[0.1, 0.2], lr=lr, freeze="linear", decisions=VOTES)
        for lr in range(1, 15)
    ]
    runs = load_runs(paths)
    for plot in (plot_accuracy_against_time, plot_phases, plot_cuts):
        figure = plot(runs, width=NARROW)
        assert figure.get_figwidth() == NARROW
    figure.draw_without_rendering()
    assert len(figure.axes) == 12


@pytest.mark.usefixtures("undrawn")
def test_what_blocks_gain_is_drawn_by_block_where_votes_have_looked_at_it(tmp_path: Path) -> None:
    gains = [[None, 0.25, 0.75], [None, 0.35, 0.65]]
    weighed = [{**line, "gains": gains} for line in VOTES]
    path = write_run(tmp_path / "weighed", accuracies=[0.1, 0.2, 0.3], freeze="coherence", decisions=weighed)
    (axes,) = plot_gains(load_runs([path])).axes
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert math.isnan(drawn[0][0]) and [values[0] for values in drawn[1:]] == pytest.approx([0.3, 0.7])
    assert write_report([path], out=tmp_path / "out") == 0
    page = (tmp_path / "out/index.html").read_text()
    assert "share of the gain of a step" in page and (tmp_path / "out/figures/gains.svg").exists()


@pytest.mark.usefixtures("undrawn")
def test_each_model_of_a_run_that_trained_several_has_a_row(tmp_path: Path) -> None:
    path = write_run(tmp_path / "several", accuracies=[0.7])
    line = json.loads((path / "metrics.jsonl").read_text())
    line["models"] = {
        "model-a": {"train_loss": 0.25, "train_accuracy": 0.9, "test_loss": 0.5, "test_accuracy": 0.8},
        "model-b": {"train_loss": 0.75, "train_accuracy": 0.7},
    }
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert models_table(load_run(path)).rows == (
        ("model-a", "80.0 %", "0.5", "90.0 %", "0.2"),
        ("model-b", "", "", "70.0 %", "0.8"),
    )
    write_report([path, write_run(tmp_path / "one", accuracies=[0.6])], out=tmp_path / "out")
    assert (tmp_path / "out" / "index.html").read_text().count("model-a") == 1


def test_runs_of_different_lengths_are_drawn_to_their_ends(tmp_path: Path) -> None:
    lengths = {"short": 2, "long": 9, "middle": 4}
    paths = [
        write_run(tmp_path / name, accuracies=[0.1] * length, freeze="linear", decisions=VOTES)
        for name, length in lengths.items()
    ]
    for axes in plot_cuts(load_runs(paths)).axes:
        assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] >= 9


@pytest.mark.parametrize("most", [figures.MOST_PHASES, 3])
def test_stacked_phases_add_up_to_the_training_time(
    pair: list[Path], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_PHASES", most)
    runs = load_runs(pair)
    figure = plot_phases(runs)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) <= most and (most > 3 or names[-1] == figures.REST)
    bars = figure.axes[0].patches
    for row, run in enumerate(runs):
        ends = [bar.get_x() + bar.get_width() for bar in bars if round(bar.get_y() + bar.get_height() / 2) == row]  # type: ignore[attr-defined]
        assert max(ends) == pytest.approx(run.train_seconds)


def test_a_curve_of_several_seeds_is_their_mean_over_the_epochs_that_all_have(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", accuracies=[0.2, 0.4, 0.6], epochs=3)
    second = write_run(tmp_path / "b", accuracies=[0.4, 0.8], epochs=3, speed=2.0)
    times, accuracies = accuracy_curve(load_runs([first, second]))
    assert accuracies == pytest.approx([30, 60])
    assert times == pytest.approx([0.75 * sum(PHASES.values()), 1.5 * sum(PHASES.values())])


def test_the_baseline_is_grey_and_no_two_of_many_lines_look_the_same(tmp_path: Path) -> None:
    others = {f"run-{k}": {"freeze": "static", "cut": k, "lr": k + 1} for k in range(12)}
    looks = colours(groups_of(tmp_path, {"full": {}, **others}))
    assert looks[0][0] not in COLOURS
    assert len(set(looks)) == 13


@pytest.mark.parametrize("places", [[0.5, 0.5, 0.5], [0.99, 1.0, 0.2], [0.0, 0.01, 0.02], [1.0]])
def test_labels_keep_their_order_and_do_not_overlap(places: list[float]) -> None:
    found = spread_out(places, [0.1] * len(places))
    order = sorted(range(len(places)), key=lambda i: places[i])
    gaps = [found[b] - found[a] for a, b in itertools.pairwise(order)]
    assert all(gap >= 0.1 - 1e-9 for gap in gaps)
    assert max(found) <= 0.95 + 1e-9


def test_a_page_of_any_sections_can_be_written(tmp_path: Path) -> None:
    table = Table(columns=("x", "y"), rows=(("1 < 2", "3"),), title="folded away", folded=True)
    path = write_page(
        "A & B", [Section(heading="Six", text=("One.",), points=("a point",), tables=(table,))], out=tmp_path
    )
    page = path.read_text()
    for text in ("<title>A &amp; B</title>", "<li>a point</li>", "<summary>folded away</summary>", "1 &lt; 2"):
        assert text in page


@pytest.mark.usefixtures("undrawn")
def test_a_command_is_broken_between_words_only_and_many_votes_are_folded(tmp_path: Path) -> None:
    votes = [vote(step, before=1, after=1, proposals=[1, 1], weights=[1.0, 1.0]) for step in range(1, 26)]
    folder = write_run(tmp_path / "a", accuracies=[0.5, 0.6, 0.7], decisions=votes, freeze="linear", schedule="cosine")
    page = write_report_page(load_runs([folder]), out=tmp_path / "out").read_text()
    assert '<span class="word">--schedule</span> <span class="word">cosine</span>' in page
    assert page.count("<details>") == 1


@pytest.mark.usefixtures("undrawn")
def test_accuracy_on_held_out_samples_is_said_to_be_that(tmp_path: Path) -> None:
    held = write_run(tmp_path / "a", accuracies=[0.5], validation_fraction=0.1)
    test = write_run(tmp_path / "b", accuracies=[0.5])
    pages = [
        write_report_page(load_runs(runs), out=tmp_path / "out").read_text() for runs in ([held], [test], [held, test])
    ]
    told = [page.partition("Accuracy: on ")[2].partition(", after")[0] for page in pages]
    assert told[:2] == ["held-out samples", "the test set"] and "--validation-fraction" in told[2]
