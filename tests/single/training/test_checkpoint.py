from __future__ import annotations

import hashlib
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

import numpy as np
import pytest
import torch

from hvfreeze.errors import RefusedError
from hvfreeze.training.checkpoints import file as checkpoint
from tests.program import ROOT, call

KILLED_SAVES = Path(__file__).with_name("workers") / "killed_saves.py"
SMALL = ["--model", "shufflenet_v2_x0_5", "--train-samples", "64", "--batch-size", "16", "--epochs", "2"]
SMALL += ["--threads", "1", "--freeze", "linear", "--interval", "3", "--freeze-warmup", "2", "--checkpoint-every", "1"]


def state_after(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step))}


def save(directory: Path, *steps: int, size: int = 1) -> Path:
    for step in steps:
        own = [checkpoint.packed({"rank": rank}) for rank in range(size)]
        path = checkpoint.save(directory, [checkpoint.packed(state_after(step)), *own], step=step)
    return path


def load(path: Path, *, size: int = 1) -> dict[str, Any]:
    """The shared state in a checkpoint, of which every section is read."""
    opened = checkpoint.open_checkpoint(path, size=size)
    for rank in range(size):
        assert checkpoint.unpacked(opened.section(1 + rank), name=str(path)) == {"rank": rank}
    return checkpoint.unpacked(opened.section(0), name=str(path))


def step_in(path: Path) -> int:
    state = load(path)
    step: int = state["step"]
    assert torch.equal(state["weights"], state_after(step)["weights"])
    return step


def forged(shared: bytes, own: bytes = b"", **header: Any) -> bytes:
    """A file around two sections whose digest is right."""
    line = json.dumps({"step": 1, "size": 1, "sections": [len(shared), len(own)], **header}).encode() + b"\n"
    return line + shared + own + hashlib.sha256(line + shared + own).hexdigest().encode()


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
            load(path)
    path.write_bytes(whole)
    assert step_in(path) == 1


def test_a_file_that_is_cut_short_or_too_long_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    whole = path.read_bytes()
    for kept in [*(len(whole) * tenth // 10 for tenth in range(10)), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(RefusedError, match=f"{path} is damaged"):
            load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(RefusedError, match=f"{path} is damaged"):
        load(path)


def test_another_number_of_ranks_cannot_resume(tmp_path: Path) -> None:
    path = save(tmp_path, 1, size=4)
    with pytest.raises(RefusedError, match=f"{path} was written by 4 ranks and cannot resume on 2"):
        checkpoint.open_checkpoint(path, size=2)


class Evil:
    def __init__(self, probe: Path) -> None:
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.probe),)


@pytest.mark.parametrize("section", [0, 1], ids=["shared", "own"])
@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_code_in_a_checkpoint_is_refused_and_does_not_run(
    tmp_path: Path, write: Callable[..., None], section: int
) -> None:
    path, probe, buffer = checkpoint.path_of(tmp_path, 1), tmp_path / "code-was-run", io.BytesIO()
    write({"step": 1, "ranks": [Evil(probe)]}, buffer)
    harmless = bytes(checkpoint.packed({"rank": 0}).numpy())
    sections = [harmless, harmless]
    sections[section] = buffer.getvalue()
    path.write_bytes(forged(*sections))
    opened = checkpoint.open_checkpoint(path, size=1)
    with pytest.raises(RefusedError, match=f"{path} holds more than plain values"):
        checkpoint.unpacked(opened.section(section), name=str(path))
    assert checkpoint.unpacked(opened.section(1 - section), name=str(path)) == {"rank": 0}
    assert not probe.exists()
    pickle.loads(pickle.dumps(Evil(probe)))
    assert probe.exists(), "the object is harmless, this test proves nothing"


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    path, buffer = checkpoint.path_of(tmp_path, 1), io.BytesIO()
    torch.save([1, 2], buffer)
    for payload in (b"", b"no archive", buffer.getvalue()):
        path.write_bytes(forged(payload))
        with pytest.raises(RefusedError, match=str(path)):
            load(path)
    with pytest.raises(RefusedError, match=r"absent\.pt cannot be read: No such file"):
        load(tmp_path / "absent.pt")


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n",
        b'{"step": 1, "size": 1, "sections": [1e999, 0]}\n',
        b'{"step": 1, "size": true, "sections": [0, 0]}\n',
        b'{"step": 1, "size": 1, "sections": [-5, 5]}\n',
        b'{"step": 1, "size": 1, "sections": 3}\n',
        b'{"step": 1, "size": 5, "sections": [0, 0]}\n',
        b'{"step": 1, "size": 1, "sections": [0, 0]}',
        b"9" * (checkpoint.LONGEST_HEADER + 5) + b"\n",
    ],
    ids=["nested", "infinite", "bool", "negative", "number", "too few", "no end", "endless"],
)
def test_a_strange_header_is_damage_and_no_traceback(tmp_path: Path, line: bytes) -> None:
    path = checkpoint.path_of(tmp_path, 1)
    path.write_bytes(line + hashlib.sha256(line).hexdigest().encode())
    with pytest.raises(RefusedError, match=f"{path} is damaged"):
        load(path)


def test_a_pipe_in_place_of_a_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    path = checkpoint.path_of(tmp_path, 1)
    os.mkfifo(path)
    with pytest.raises(RefusedError, match="is no plain file"):
        load(path)


def test_a_checkpoint_that_was_not_put_whole_leaves_nothing(tmp_path: Path) -> None:
    section = checkpoint.packed(state_after(1))
    saving = checkpoint.Saving(tmp_path, step=1, size=1, lengths=[len(section), len(section)])
    saving.put(section)
    saving.let_go()
    assert list(tmp_path.iterdir()) == []
    whole = checkpoint.Saving(tmp_path, step=1, size=0, lengths=[len(section)])
    whole.put(section)
    whole.finish()
    whole.let_go()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_sections_beyond_two_gigabytes_are_written_and_read(tmp_path: Path) -> None:
    # Zeros cost no memory until they are read, and no disk: only their digest takes time.
    large = torch.from_numpy(np.zeros(2**31 + 2**20, dtype=np.uint8))
    path = checkpoint.save(tmp_path, [large, checkpoint.packed({"rank": 0})], step=1)
    opened = checkpoint.open_checkpoint(path, size=1)
    assert opened.offsets[1] - opened.offsets[0] == len(large)
    assert checkpoint.unpacked(opened.section(1), name="large") == {"rank": 0}
    path.unlink()


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
    assert "another run's (model: 'squeezenet1_1' there, 'shufflenet_v2_x0_5' here)" in refused.messages[0], str(
        refused
    )


def stopped_before_its_end(finished: Path, folder: Path) -> Path:
    """A copy of a run that may be resumed; its newest checkpoint's path is returned."""
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    newest = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    return newest


def test_the_program_refuses_every_cut_of_a_checkpoint_and_one_of_which_a_setting_differs(
    finished: Path, tmp_path: Path
) -> None:
    newest = stopped_before_its_end(finished, tmp_path / "run")
    whole = newest.read_bytes()
    for kept in (*(len(whole) * tenth // 10 for tenth in range(10)), len(whole) - 1):
        newest.write_bytes(whole[:kept])
        refused = resume(tmp_path / "run")
        assert refused.returncode == 3 and len(refused.messages) == 1, str(refused)
        assert f"{newest} is damaged" in refused.messages[0], str(refused)
    newest.write_bytes(whole)
    opened = checkpoint.open_checkpoint(newest, size=1)
    shared, own = (checkpoint.unpacked(opened.section(number), name="") for number in range(2))
    for leaf, other in (("seed", 7), ("lr", 0.5), ("freeze", "static"), ("augment", "none")):
        before = shared["run"][leaf]
        forged_state = {**shared, "run": {**shared["run"], leaf: other}}
        checkpoint.save(newest.parent, [checkpoint.packed(forged_state), checkpoint.packed(own)], step=opened.step)
        refused = resume(tmp_path / "run")
        assert refused.returncode == 3 and len(refused.messages) == 1, str(refused)
        assert f"another run's ({leaf}: {other!r} there, {before!r} here)" in refused.messages[0], str(refused)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_the_program_runs_no_code_that_a_checkpoint_holds(finished: Path, tmp_path: Path) -> None:
    newest = stopped_before_its_end(finished, tmp_path / "run")
    opened, probe = checkpoint.open_checkpoint(newest, size=1), tmp_path / "code-was-run"
    for place in range(2):
        sections = [bytes(opened.section(number).numpy()) for number in range(2)]
        buffer = io.BytesIO()
        torch.save({"step": opened.step, "evil": Evil(probe)}, buffer)
        sections[place] = buffer.getvalue()
        evil = tmp_path / f"evil{place}"
        shutil.copytree(tmp_path / "run", evil)
        (evil / "checkpoints" / newest.name).write_bytes(forged(*sections, step=opened.step))
        refused = resume(evil)
        assert refused.returncode == 3 and len(refused.messages) == 1, str(refused)
        assert "holds more than plain values" in refused.messages[0] and not probe.exists(), str(refused)


def test_the_program_refuses_logs_that_lack_lines(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    refused = resume(folder)
    assert refused.returncode == 3, str(refused)
    assert len(refused.messages) == 1, str(refused)
    assert "metrics.jsonl has" in refused.messages[0], str(refused)
    assert (folder / "metrics.jsonl").read_text() == lines[0]
