"""A mistake in a training script ends in one message and the exit code of the whole job, never in a hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.errors import UsageError
from hvfreeze.integration.script_world import report_errors
from tests.parallel.mpirun import mpirun

WORKER = Path(__file__).with_name("workers") / "own_mistakes.py"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mistake", "start", "code", "message"),
    [
        (
            "other layers on one rank",
            "not yet",
            2,
            "second.bias is 'float32 [2]' on rank 0 and 'float32 [3]' on",
        ),
        ("one rank fails", "running", 1, "nobody expected this"),
    ],
)
def test_a_mistake_ends_the_job_with_its_message(mistake: str, start: str, code: int, message: str) -> None:
    result = mpirun(2, WORKER, args=[mistake, start], timeout=60, every_rank_reports=False)
    assert result.returncode == code, result
    assert message in result.stderr, result
    assert ("Traceback" in result.stderr) == (code == 1), result
    assert result.stderr.count("hvfreeze: error:") == (code == 2), result


def test_one_process_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(SoloWorld, "abort", lambda self, code: codes.append(code))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    report_errors(SoloWorld())
    sys.excepthook(UsageError, UsageError("cut (1) is wrong"), None)
    assert codes == [2] and capsys.readouterr().err == "hvfreeze: error: cut (1) is wrong\n"
    sys.excepthook(KeyError, KeyError("unexpected"), None)
    assert codes == [2] and "KeyError: 'unexpected'" in capsys.readouterr().err
