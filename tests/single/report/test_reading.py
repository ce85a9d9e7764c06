"""Runs as they are read from their directories, whole, unfinished, damaged or from another version."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvfreeze.errors import RefusedError
from hvfreeze.report import listing, tables
from hvfreeze.report.comparison import group_by_seed
from hvfreeze.report.figures import accuracy_curve
from hvfreeze.report.listing import row_of
from hvfreeze.report.report import summary_section, write_report
from hvfreeze.runs import reading
from hvfreeze.runs.reading import load_run, load_runs
from tests.single.report.conftest import VOTES
from tests.single.report.run_directories import PHASES, write_run


def test_a_run_is_read_with_what_came_of_it(pair: list[Path]) -> None:
    run = load_run(pair[1])
    assert (run.name, run.size, run.finished, run.final_cut) == ("voted", 2, True, 1)
    assert (run.test_accuracy, run.best_accuracy) == (0.75, 0.75)
    assert load_run(pair[0]).best_accuracy == 0.9
    assert run.train_seconds == pytest.approx(3 * sum(PHASES.values()) / 1.25)
    assert run.allreduce_bytes == 30_000_000
    assert run.cut_history[0] == (0, 0, 0)
    assert run.settings["freeze"] == "gradient-norm"


def test_an_unfinished_run_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "cut-off", accuracies=[0.1, 0.2, 0.3], epochs=9, finished=False, decisions=VOTES)
    whole = load_run(directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "step"')
    run = load_run(directory)
    assert len(run.metrics) == 3 and not run.finished
    assert run.images_per_second == pytest.approx(640 / sum(PHASES.values()))
    assert run.train_seconds == whole.train_seconds == pytest.approx(3 * sum(PHASES.values()))
    assert run.cut_history == [(0, 0, 0), (1, 10, 1)]


@pytest.mark.usefixtures("undrawn")
def test_epochs_that_were_not_evaluated_are_left_out_of_curves_and_accuracies(tmp_path: Path) -> None:
    seldom = load_run(write_run(tmp_path / "seldom", accuracies=[None, 0.9, None, 0.8]))
    assert (seldom.test_accuracy, seldom.best_accuracy) == (0.8, 0.9)
    times, accuracies = accuracy_curve([seldom])
    assert accuracies == [90.0, 80.0]
    assert times == pytest.approx([2 * sum(PHASES.values()), 4 * sum(PHASES.values())])
    write_run(tmp_path / "not-yet", accuracies=[None], epochs=9, finished=False)
    assert write_report([tmp_path / "seldom", tmp_path / "not-yet"], out=tmp_path / "page") == 0
    assert not re.search(r"\bnan\b", (tmp_path / "page/index.html").read_text())


@pytest.mark.parametrize(("ended", "cut"), [(0.8, 0), (0.3, 5)])
def test_a_run_that_ended_with_another_model_than_its_last_epochs_is_shown_with_that(
    tmp_path: Path, ended: float, cut: int
) -> None:
    """As --freeze auto does where held-out samples find an earlier state better, or a tuned model's own last layer."""
    directory = write_run(tmp_path / "run", accuracies=[0.4, None, 0.7], decisions=VOTES)
    summary = json.loads((directory / "summary.json").read_text())
    last = summary["train_seconds"] + 1
    changed = {**summary, "test_accuracy": ended, "final_cut": cut, "train_seconds": last}
    (directory / "summary.json").write_text(json.dumps(changed))
    run = load_run(directory)
    assert (run.test_accuracy, run.best_accuracy, run.final_cut) == (ended, max(0.7, ended), cut)
    times, accuracies = accuracy_curve([run])
    assert accuracies == pytest.approx([40, 70, 100 * ended]) and times[-1] == last


def test_a_setting_that_an_older_version_did_not_know_has_its_default(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "old", accuracies=[0.1])
    (directory / "config.yaml").write_text("freeze: {freeze: percentile}\nlater: {unheard_of: 1}\n")
    settings = load_run(directory).settings
    assert (settings["freeze"], settings["model"], settings["unheard_of"]) == ("percentile", "resnet18", 1)


NO_NUMBER = {"epoch": 0, "step": "x", "cut": 0, "test_accuracy": 1, "train_seconds": 1, "seconds": {}}
NO_NUMBER |= {"images_per_second": 1, "allreduce_bytes": 0}


def test_a_folder_without_any_file_of_a_run_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"is not a run directory: it has no config.yaml; name the --run-dir of"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", None, "cannot be read"),
        ("config.yaml", b"[1, 2", "damaged"),
        ("config.yaml", b"- 1\n", "sections"),
        ("config.yaml", b"freeze: 3\n", "sections"),
        ("config.yaml", b"a: &a [x]\nb: *a\n", "damaged"),
        ("config.yaml", b"[" * 100_000, "damaged"),
        ("environment.json", None, "cannot be read"),
        ("environment.json", b"{", "damaged"),
        ("environment.json", b"[" * 100_000, "damaged"),
        ("environment.json", b"{}", "size is missing"),
        ("environment.json", b'{"size": []}', "damaged: size"),
        ("metrics.jsonl", None, "cannot be read"),
        ("metrics.jsonl", b"", "no epoch yet"),
        ("metrics.jsonl", b'{"epoch": 0}\n', "line 1 is damaged: step is missing"),
        ("metrics.jsonl", json.dumps(NO_NUMBER).encode(), r"line 1 is damaged: step has an invalid value \('x'\)"),
        ("metrics.jsonl", b"7\n", "not a JSON object"),
        ("decisions.jsonl", None, "cannot be read"),
        ("decisions.jsonl", b"\n", "line 1 is damaged"),
        ("summary.json", b'{"test_accuracy": 1}', "best_test_accuracy is missing"),
        ("summary.json", b"\xff\xfe", "damaged"),
        ("summary.json", b"[" * 100_000, "damaged"),
    ],
)
def test_a_missing_or_damaged_file_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    file = write_run(tmp_path / "run", accuracies=[0.1]) / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(RefusedError, match=said) as caught:
        load_run(tmp_path / "run")
    assert str(file) in str(caught.value)


ODD: list[Any] = ["x", None, [], {}, -1, math.inf, True, 10**400, ["x"], {"a": 1}]


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there are values in a file's object, the first two of each list."""
    yield place
    keys = value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield from places_in(value[key], (*place, key))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = copy.deepcopy(value)
    functools.reduce(lambda inner, key: inner[key], place[:-1], changed)[place[-1]] = new
    return changed


def show_all(directory: Path) -> None:
    row_of(directory)
    groups = group_by_seed(load_runs([directory]))
    for rows in (tables.run_rows, tables.epoch_rows, tables.vote_rows):
        tables.to_csv(rows(groups))
    run = groups[0].runs[0]
    tables.models_table(run)
    tables.vote_table(run)
    accuracy_curve([run])
    for table in (tables.summary_table, tables.phase_table, tables.command_table, tables.environment_table):
        table(groups)
    summary_section(groups)


@pytest.mark.parametrize(
    "name", ["environment.json", "metrics.jsonl", "decisions.jsonl", "summary.json", "config.yaml"]
)
def test_any_value_that_is_another_is_refused_or_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In place of each value of each file stand some of another kind."""
    decisions = [
        {**line, "shadow": {"linear": {"cut": 1, "proposals": [1, 1]}}, "gains": [[0.5, None, 0.5]]} for line in VOTES
    ]
    run = write_run(tmp_path / "run", accuracies=[0.1, 0.2, 0.3], decisions=decisions)
    text = (run / name).read_text()
    first, *others = text.splitlines() if name.endswith("jsonl") else [text]
    value = yaml.safe_load(text) if name == "config.yaml" else json.loads(first)
    if name == "metrics.jsonl":
        value |= {"models": {"model-0": {"test_accuracy": 0.5, "test_loss": 1.0}}, "test_bits_per_character": 2.0}
        others = []
    # Nearly all of the time is YAML's.
    once = functools.cache(reading.read_config)
    monkeypatch.setattr(reading, "read_config", once)
    monkeypatch.setattr(listing, "read_config", once)
    refused = 0
    places = list(places_in(value))
    for number, place in enumerate(places[:: 3 if name == "config.yaml" else 1]):
        # In turn: what a place does with one kind, its neighbour does with the next.
        for odd in ODD[number % 4 :: 4] if name != "config.yaml" else ("x", [])[number % 2 :][:1]:
            changed = replaced(value, place, odd)
            whole = "\n".join([json.dumps(changed), *others])
            # JSON is YAML, too.
            (run / name).write_text(whole)
            if name == "config.yaml":
                once.cache_clear()
            try:
                show_all(run)
            except RefusedError as error:
                assert name in str(error) and "\n" not in str(error)
                refused += 1
            except Exception as error:
                pytest.fail(f"{place} is {odd!r:.40}: {type(error).__name__}: {error}")
    assert refused > 9


def test_runs_of_equal_name_are_told_apart_and_repeated_ones_are_read_once(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / parent / "full", accuracies=[0.1]) for parent in ("a", "b"))
    assert [run.name for run in load_runs([first, second, first])] == ["a/full", "b/full"]
    third = write_run(tmp_path / "c/a/full", accuracies=[0.1])
    assert [run.name for run in load_runs([first, second, third])] == [f"{tmp_path.name}/a/full", "b/full", "c/a/full"]
