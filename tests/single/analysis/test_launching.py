from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from analysis import ddp
from analysis.sweeps.launching import Site, flags_of, follow, launch
from analysis.sweeps.presets import SMOKE
from hvfreeze.errors import RefusedError
from hvfreeze.runs.reading import load_run
from tests.program import succeed

SMALL = {"freeze": "none", "model": "resnet20", "image_size": 16}


@pytest.mark.seldom
def test_one_rank_under_ddp_trains_exactly_as_ours_does(tmp_path: Path) -> None:
    planned, site = SMOKE.run("theirs", 0, SMALL, ranks=1, program="analysis.ddp"), Site(work=tmp_path)
    assert ddp.main(flags_of(planned, site, tmp_path / "theirs")) == 0
    succeed(*flags_of(planned, site, tmp_path / "ours"))
    theirs, ours = (load_run(tmp_path / name) for name in ("theirs", "ours"))
    same = ("epoch", "step", "train_loss", "train_accuracy", "test_accuracy")
    found, wanted = ([[line[key] for key in same] for line in run.metrics] for run in (theirs, ours))
    assert found == [pytest.approx(line, rel=1e-4) for line in wanted]
    assert theirs.finished
    assert theirs.train_seconds == pytest.approx(sum(line["train_seconds"] for line in theirs.metrics), rel=0.05)


def test_a_run_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    planned = SMOKE.run("bad", 0, ranks=1, program="no_such_program")
    with pytest.raises(RefusedError, match=r"(?s)run bad-s0 ended with exit code 1:.*no_such_program"):
        launch(planned, Site(work=tmp_path), timeout=200.0)


@pytest.mark.parametrize(
    ("held", "code", "said"),
    [
        (False, 3, r"ddp: error: data folder \S+ does not exist"),
        (True, 2, r"ddp: error: --run-dir \(\S+\) holds a run, and this program cannot continue it; choose another"),
    ],
)
def test_ddp_refuses_missing_data_and_a_directory_that_holds_a_run(
    held: bool, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if held:
        (tmp_path / "config.yaml").touch()
    given = ["train", "--data", "imagefolder", "--data-dir", str(tmp_path / "absent"), "--run-dir", str(tmp_path)]
    assert ddp.main(given) == code
    assert re.match(said, capsys.readouterr().err)
    assert not (tmp_path / "rendezvous").exists()


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    assert follow(command, tmp_path / "log", timeout=2.0) == 110
    assert time.monotonic() - started < 300
