"""The program beside a checkpoint that is damaged, of another run, or means harm: refused, or gone round."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from hvfreeze.training.checkpoints import file as checkpoint
from tests.program import call
from tests.single.training.forging import Evil, forged

SMALL = ["--model", "shufflenet_v2_x0_5", "--train-samples", "64", "--batch-size", "16", "--epochs", "2"]
SMALL += ["--threads", "1", "--freeze", "linear", "--interval", "3", "--freeze-warmup", "2", "--checkpoint-every", "1"]


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
