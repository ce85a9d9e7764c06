from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hvfreeze.errors import RefusedError
from hvfreeze.ranks.world import SoloWorld
from hvfreeze.training import checkpoint
from tests.program import ROOT, call

KILLED_SAVES = Path(__file__).with_name("workers") / "killed_saves.py"
SMALL = ["--model", "shufflenet_v2_x0_5", "--train-samples", "64", "--batch-size", "16", "--epochs", "2"]
SMALL += ["--threads", "1", "--freeze", "linear", "--interval", "3", "--freeze-warmup", "2"]


def state_after(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step))}


def save(directory: Path, *steps: int, size: int = 1) -> Path:
    for step in steps:
        path = checkpoint.save(directory, state_after(step), step=step, size=size)
    return path


def step_in(path: Path) -> int:
    state = checkpoint.load(path, size=1)
    step: int = state["step"]
    assert torch.equal(state["weights"], state_after(step)["weights"])
    return step


def forged(payload: bytes) -> bytes:
    """A file around `payload` whose digest is right."""
    header = {
        "sha256": checkpoint.digest_of(payload, step=1, size=1),
        "bytes": len(payload),
        "step": 1,
        "size": 1,
    }
    return json.dumps(header).encode() + b"\n" + payload


def test_what_was_saved_is_loaded_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path / "checkpoints", 9, 10, 11)
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [step_in(path) for path in kept] == [10, 11]
    assert checkpoint.newest(tmp_path / "checkpoints") == kept[-1]
    assert [oct(path.stat().st_mode & 0o777) for path in [tmp_path / "checkpoints", *kept]] == ["0o700"] + ["0o600"] * 2


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    whole = path.read_bytes()
    header = 8 * (whole.index(b"\n") + 1)
    payload = [header + (8 * len(whole) - header) * number // 50 + number % 8 for number in range(50)]
    for position in [*range(header), *payload, 8 * len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(RefusedError, match=f"{path} is damaged"):
            checkpoint.load(path, size=1)
    path.write_bytes(whole)
    assert step_in(path) == 1


def test_a_file_that_is_cut_short_or_too_long_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    whole = path.read_bytes()
    for kept in [*(len(whole) * tenth // 10 for tenth in range(10)), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(RefusedError, match=f"{path} is damaged"):
            checkpoint.load(path, size=1)
    path.write_bytes(whole + b"\0")
    with pytest.raises(RefusedError, match=f"{path} is damaged"):
        checkpoint.load(path, size=1)


def test_a_damaged_checkpoint_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    newest = save(tmp_path, 1, 2)
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(RefusedError, match=f"{newest} is damaged; remove it to resume from the one before"):
        checkpoint.load_everywhere(tmp_path, SoloWorld())
    newest.unlink()
    state = checkpoint.load_everywhere(tmp_path, SoloWorld())
    assert state is not None
    assert state["step"] == 1


def test_another_number_of_ranks_cannot_resume(tmp_path: Path) -> None:
    path = save(tmp_path, 1, size=4)
    with pytest.raises(RefusedError, match=f"{path} was written by 4 ranks and cannot resume on 2"):
        checkpoint.load(path, size=2)


class Evil:
    def __init__(self, probe: Path) -> None:
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.probe),)


@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_code_in_a_checkpoint_is_refused_and_does_not_run(tmp_path: Path, write: Callable[..., None]) -> None:
    path, probe, buffer = checkpoint.path_of(tmp_path, 1), tmp_path / "code-was-run", io.BytesIO()
    write({"step": 1, "ranks": [Evil(probe)]}, buffer)
    path.write_bytes(forged(buffer.getvalue()))
    with pytest.raises(RefusedError, match=f"{path} holds more than plain values"):
        checkpoint.load(path, size=1)
    assert not probe.exists()
    pickle.loads(pickle.dumps(Evil(probe)))
    assert probe.exists(), "the object is harmless, this test proves nothing"


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    path, buffer = checkpoint.path_of(tmp_path, 1), io.BytesIO()
    torch.save([1, 2], buffer)
    for payload in (b"", b"no archive", buffer.getvalue()):
        path.write_bytes(forged(payload))
        with pytest.raises(RefusedError, match=str(path)):
            checkpoint.load(path, size=1)
    with pytest.raises(RefusedError, match=r"absent\.pt cannot be read: No such file"):
        checkpoint.load(tmp_path / "absent.pt", size=1)


@contextmanager
def no_room() -> Iterator[None]:
    """Lets no file grow beyond a kilobyte; for a moment only, since pytest's own output may go to a file too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    old = save(tmp_path, 1, 2)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RefusedError, match=rf"{checkpoint.path_of(tmp_path, 3)} cannot be written \(.+\)"), no_room():
        save(tmp_path, 3)
    assert sorted(tmp_path.iterdir()) == before
    assert step_in(old) == 2


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RefusedError, match="cannot be written"):
        save(tmp_path / "file", 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_save_that_is_killed_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    base, copies = tmp_path / "base", tmp_path / "copies"
    save(base, 1, 2)
    subprocess.run(
        [sys.executable, str(KILLED_SAVES), str(base), str(copies)],
        check=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = []
    for number in range(len(list(copies.iterdir()))):
        newest = checkpoint.newest(copies / str(number))
        assert newest is not None
        found.append(step_in(newest))
        # The next save sweeps up what the kill left.
        save(copies / str(number), 4)
        assert all(path.name.startswith("step-") for path in (copies / str(number)).iterdir())
    assert len(found) > 20
    assert found == sorted(found)
    assert set(found) == {2, 3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    outcome = call("train", *SMALL, "--run-dir", str(folder))
    assert outcome.returncode == 0, str(outcome)
    return folder


def resume(folder: Path) -> Any:
    return call("train", *SMALL, "--run-dir", str(folder), "--resume")


def digest_of_run(folder: Path) -> str:
    digest: str = json.loads((folder / "summary.json").read_text())["parameter_digest"]
    return digest


def test_the_program_refuses_a_damaged_checkpoint_and_goes_on_from_the_one_before(
    finished: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "summary.json").unlink()
    newest = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    logs = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "decisions.jsonl")}
    refused = resume(folder)
    assert refused.returncode == 3, str(refused)
    assert len(refused.messages) == 1, str(refused)
    assert f"{newest} is damaged" in refused.messages[0], str(refused)
    assert {name: (folder / name).read_bytes() for name in logs} == logs
    newest.unlink()
    resumed = resume(folder)
    assert resumed.returncode == 0, str(resumed)
    assert digest_of_run(folder) == digest_of_run(finished)
    assert (folder / "decisions.jsonl").read_bytes() == logs["decisions.jsonl"]


def test_the_program_refuses_a_checkpoint_of_another_model(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    outcome = call("train", *SMALL, "--model", "squeezenet1_1", "--run-dir", str(other))
    assert outcome.returncode == 0, str(outcome)
    folder = shutil.copytree(finished, tmp_path / "run")
    theirs = checkpoint.newest(other / "checkpoints")
    assert theirs is not None
    (folder / "checkpoints" / theirs.name).write_bytes(theirs.read_bytes())
    refused = resume(folder)
    assert refused.returncode == 3, str(refused)
    assert len(refused.messages) == 1, str(refused)
    assert "another model" in refused.messages[0], str(refused)
