from __future__ import annotations

import pytest

from hvfreeze.runs import progress
from hvfreeze.runs.progress import Progress, RunLogger


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
    shown.step(5, 10, "steps")
    shown.step(10, 10, "the head is being solved: pass 7", even=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0/10 | nothing yet"
    assert lines[1] == "step 5/10 | steps | 0.0 min left"
    assert lines[2] == "step 10/10 | the head is being solved: pass 7"


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
