"""The torture: it finds planted faults, continues after a stop, and a few of its rounds find nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from hvfreeze.model import model_sources
from tests.parallel import standing
from tests.parallel.workers.checking import let_models_be_small
from tests.torture import flips, kills
from tests.torture.ledger import Ledger

pytestmark = [pytest.mark.mpi, pytest.mark.fault]


def test_a_few_flips_find_nothing_and_what_is_planted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_sources, "_construct", model_sources._construct)
    let_models_be_small()
    victim = flips.Victim(tmp_path)
    assert victim.judge(victim.checkpoint, victim.state) == victim.judge(victim.cached, victim.rows) == flips.SAME
    for path in (victim.checkpoint, victim.cached):
        assert victim.judge(path, "what was there before") == flips.SILENT
    chance, found = random.Random(0), []
    for number in range(12):
        found.append(flips.round_of(victim, chance, number=number))
    assert [entry for entry in found if entry["faults"]] == []
    assert {entry["found"] for entry in found if "found" in entry} <= {"refused", "same"}
    assert sum("program" in entry for entry in found) == 1


@pytest.mark.seldom
@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_a_killed_run_comes_to_what_it_would_have_come_to(size: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    straight = standing.hvfreeze(size, "train", *kills.TRAINING, "--run-dir", str(tmp_path / "straight"))
    assert straight.returncode == 0, str(straight)
    expected, seconds = kills.outcome(tmp_path / "straight"), time.monotonic() - begun
    life, chance, complete = kills.Life(size, tmp_path / "life"), random.Random(0), False
    while not complete:
        # Once, soon after a checkpoint, then never: it is to end.
        longest = 1000 * seconds if life.resumes else seconds / 8
        found = kills.round_of(life, chance, expected=expected, longest=longest, ready=life.is_saved)
        assert found["faults"] == [], found
        complete = found["complete"]
    assert kills.outcome(life.run) == expected != {**expected, "parameter_digest": "another"}


def test_a_stopped_torture_goes_on_and_tells_what_it_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add("flip", seconds=0.1, faults=[])
    ledger.add("kill", seconds=5.0, faults=["hang"], signal="STOP", to="rank", ended_after=70.0, code=None)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"kind": "fl')
    again = Ledger(tmp_path)
    again.add("flip", seconds=0.1, faults=["silent"])
    assert (again.count("flip"), again.count("kill")) == (2, 1)
    assert again.faults() == {"hang": 1, "silent": 1}
    again.write_up(command="x")
    text = (tmp_path / "README.md").read_text()
    assert (
        "| kill | 1 | 12.0 | 0 | 0 | 1 | 0 | 0 | 0 |" in text
        and "| STOP | rank | 1 | 70.0 | 70.0 | None (1x) |" in text
    )
    assert Ledger(tmp_path).rounds == again.rounds
