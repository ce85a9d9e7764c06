from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvfreeze.runs import progress
from hvfreeze.runs.progress import Progress, RunLogger
from hvfreeze.wording import in_time


def test_of_several_lines_the_first_is_printed_and_all_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logger, logged = RunLogger(rank=0, quiet=False), []
    logger.info("decided\nby\nthis table")
    logger.log_to(logged.append)
    assert capsys.readouterr().out == "decided\n" and logged == ["decided\nby\nthis table"]


def test_how_long_the_rest_takes_is_told_only_where_steps_are_alike(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    shown = Progress(RunLogger(rank=0, quiet=False), 10)
    shown.step(0, 10, "nothing yet")
    shown.step(5, 10, "steps", estimated=True)
    shown.step(10, 10, "the head is being solved: pass 7", even=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0 of 10, nothing yet"
    assert lines[1] == "step 5 of about 10, steps; 0 s left"
    assert lines[2] == "the head is being solved: pass 7"


def test_a_bar_goes_on_showing_what_is_done_where_no_step_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LOOKS", 0.0)
    shown = Progress(RunLogger(rank=0, quiet=False), 10)
    for number in (1, 2):
        shown.step(10, 10, f"pass {number}", even=False)
    shown.close()
    drawn = capsys.readouterr().err
    assert "pass 1" in drawn and "pass 2" in drawn and "?" not in drawn.split("pass 2")[-1]


def test_a_detail_is_logged_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    logger, logged = RunLogger(rank=0, quiet=False), []
    logger.log_to(logged.append)
    logger.detail("nothing to do about it")
    assert capsys.readouterr().out == "" and logged == ["nothing to do about it"]


def test_long_runs_log_few_progress_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1300))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    shown = Progress(RunLogger(rank=0, quiet=False), 1260)
    for number in range(1, 1261):
        shown.step(number, 1260, "21 minutes")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {second} of 1260" for second in (30, 90, 210, 450, 930)]
    assert lines[2].endswith("; 18 min left")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "0 s"), (14, "14 s"), (99, "99 s"), (1258, "21 min"), (7200, "2.0 h")]
)
def test_a_duration_has_a_unit_of_its_size(seconds: float, shown: str) -> None:
    assert in_time(seconds) == shown
