"""Checkpoint files: damage that they survive, and damage that is reported."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvfreeze.errors import RefusedError
from hvfreeze.runs import checkpoint_file as checkpoint
from tests.parallel.mpirun import ROOT, environment
from tests.single.training.forging import forged, save_sections

KILLED_SAVES = Path(__file__).with_name("workers") / "killed_saves.py"


def state_after(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step))}


def save(directory: Path, *steps: int, size: int = 1) -> Path:
    for step in steps:
        own = [checkpoint.packed({"rank": rank}) for rank in range(size)]
        path = save_sections(directory, [checkpoint.packed(state_after(step)), *own], step=step)
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


def test_what_was_saved_is_loaded_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path / "checkpoints", 9, 10, 11)
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [step_in(path) for path in kept] == [10, 11]
    assert checkpoint.newest(tmp_path / "checkpoints") == kept[-1]
    assert [oct(path.stat().st_mode & 0o777) for path in [tmp_path / "checkpoints", *kept]] == ["0o700"] + ["0o600"] * 2


def test_steps_count_by_number_and_a_copy_by_another_name_does_not(tmp_path: Path) -> None:
    save(tmp_path, 99_999_998)
    (tmp_path / "step-old.pt").write_bytes(b"")
    last = save(tmp_path, 99_999_999, 100_000_000)
    assert checkpoint.newest(tmp_path) == last
    assert [step_in(path) for path in checkpoint.checkpoints_in(tmp_path)] == [99_999_999, 100_000_000]


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


def test_another_number_of_ranks_cannot_resume(tmp_path: Path) -> None:
    path = save(tmp_path, 1, size=4)
    with pytest.raises(RefusedError, match=f"{path} was written by 4 ranks and cannot resume bit for bit on 2"):
        checkpoint.open_checkpoint(path, size=2)


def with_digest(line: bytes) -> bytes:
    return line + hashlib.sha256(line).hexdigest().encode()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(forged(b""), "", id="no state"),
        pytest.param(forged(b"no archive"), "", id="no archive"),
        pytest.param(forged(saved([1, 2])), "", id="another value"),
        pytest.param(with_digest(b"[" * 100_000 + b"\n"), " is damaged", id="nested"),
        pytest.param(with_digest(b'{"step": 1, "size": 1, "sections": [1e999, 0]}\n'), " is damaged", id="infinite"),
        pytest.param(with_digest(b'{"step": 1, "size": true, "sections": [0, 0]}\n'), " is damaged", id="bool"),
        pytest.param(with_digest(b'{"step": 1, "size": 1, "sections": [-5, 5]}\n'), " is damaged", id="negative"),
        pytest.param(with_digest(b'{"step": 1, "size": 1, "sections": 3}\n'), " is damaged", id="number"),
        pytest.param(with_digest(b'{"step": 1, "size": 5, "sections": [0, 0]}\n'), " is damaged", id="too few"),
        pytest.param(with_digest(b'{"step": 1, "size": 1, "sections": [0, 0]}'), " is damaged", id="no end"),
        pytest.param(with_digest(b"9" * (checkpoint.LONGEST_HEADER + 5) + b"\n"), " is damaged", id="endless"),
        pytest.param(None, " cannot be read: No such file", id="absent"),
    ],
)
def test_a_strange_file_is_refused_by_name_and_no_traceback(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = checkpoint.path_of(tmp_path, 1)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RefusedError, match=f"{path}{words}"):
        load(path)


def test_a_file_that_is_cut_short_or_too_long_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    whole = path.read_bytes()
    for damaged in [*(whole[: len(whole) * tenth // 10] for tenth in range(10)), whole[:-1], whole + b"\0"]:
        path.write_bytes(damaged)
        with pytest.raises(RefusedError, match=f"{path} is damaged"):
            load(path)


def test_a_pipe_in_place_of_a_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    path = checkpoint.path_of(tmp_path, 1)
    os.mkfifo(path)
    with pytest.raises(RefusedError, match="is not a regular file"):
        load(path)


def test_a_checkpoint_that_was_not_put_whole_leaves_nothing(tmp_path: Path) -> None:
    section = checkpoint.packed(state_after(1))
    saving = checkpoint.Saving(tmp_path, step=1, size=1, lengths=[len(section), len(section)])
    saving.put(section)
    saving.release()
    assert list(tmp_path.iterdir()) == []
    whole = checkpoint.Saving(tmp_path, step=1, size=0, lengths=[len(section)])
    whole.put(section)
    whole.finish()
    whole.release()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


class Length:
    """In place of a digest, which takes seconds for so much: the number of bytes."""

    def __init__(self, part: bytes = b"") -> None:
        self.bytes = len(part)

    def update(self, part: Any) -> None:
        self.bytes += memoryview(part).nbytes

    def hexdigest(self) -> str:
        return f"{self.bytes:064}"


@pytest.mark.seldom
def test_sections_beyond_two_gigabytes_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.hashlib, "sha256", Length)
    # Zeros cost no memory until they are read, and no disk.
    large = torch.from_numpy(np.zeros(2**31 + 2**20, dtype=np.uint8))
    path = save_sections(tmp_path, [large, checkpoint.packed({"rank": 0})], step=1)
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


def test_a_save_that_is_killed_anywhere_leaves_the_old_or_the_new_checkpoint_and_no_process(tmp_path: Path) -> None:
    base, copies = tmp_path / "base", tmp_path / "copies"
    save(base, 1, 2)
    subprocess.run(
        [sys.executable, str(KILLED_SAVES), str(base), str(copies)],
        check=True,
        timeout=120,
        cwd=ROOT,
        env=environment({}, out=tmp_path, timeout=120),
    )
    found = []
    for number in range(len(list(copies.glob("[0-9]*")))):
        newest = checkpoint.newest(copies / str(number))
        assert newest is not None
        found.append(step_in(newest))
        # The next save sweeps up what the kill left.
        save(copies / str(number), 4)
        assert all(path.name.startswith("step-") for path in (copies / str(number)).iterdir())
    assert len(found) > 20
    assert found == sorted(found)
    assert set(found) == {2, 3}
    # The worker has ended, although its last checkpoint was never used.
    assert not list((copies / "lost").glob("step-*.pt"))
