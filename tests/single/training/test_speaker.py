from __future__ import annotations

import pytest

from hvfreeze.training.progress import Speaker


def test_of_several_lines_the_first_is_printed_and_all_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    speaker, logged = Speaker(rank=0, quiet=False), []
    speaker.say("decided\nby\nthis table")
    speaker.log_to(logged.append)
    assert capsys.readouterr().out == "decided\n" and logged == ["decided\nby\nthis table"]
