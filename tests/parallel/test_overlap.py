"""Training images among the evaluated ones are found wherever ranks hold them, and told once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.standing import hvfreeze
from tests.single.training.test_overlap import TRAIN, copied, save_noise

pytestmark = [pytest.mark.mpi, pytest.mark.standing]


def found_by(size: int, folder: Path, run: Path, *flags: str) -> tuple[list[str], dict[str, int]]:
    command = [*TRAIN, "--batch-size", "2", "--data", "imagefolder", "--data-dir", str(folder), "--run-dir", str(run)]
    result = hvfreeze(size, *command, *flags)
    assert result.returncode == 0, str(result)
    told = [line for line in result.stdout.splitlines() if "also in the training set" in line]
    return told, json.loads((run / "summary.json").read_text())["evaluated_in_training"]


@pytest.mark.parametrize("size", [3])
def test_one_copy_is_found_whichever_ranks_hold_it(size: int, tmp_path: Path) -> None:
    folder = save_noise(tmp_path / "data", training=12)
    copied(folder)
    [note], found = found_by(size, folder, tmp_path / "run")
    assert "train/b/3.webp" in note and found == {"found": 1, "compared": 9}


@pytest.mark.parametrize("size", [4])
def test_ranks_that_hold_no_images_look_at_none(size: int, tmp_path: Path) -> None:
    folder = save_noise(tmp_path / "data", training=12)
    copied(folder)
    flags = ["--strategy", "grid", "--parts", "2", "--micro-batches", "1", "--shuffle", "global"]
    [note], found = found_by(size, folder, tmp_path / "run", *flags)
    assert "train/b/3.webp" in note and found == {"found": 1, "compared": 9}


@pytest.mark.parametrize("size", [2])
def test_streamed_images_of_ones_own_are_looked_at_by_all_ranks_together(size: int, tmp_path: Path) -> None:
    command = [*TRAIN, "--batch-size", "2", "--data", "tests.single.training.test_overlap:copied_elsewhere"]
    # Slurm leaves no memory for pixels.
    result = hvfreeze(size, *command, "--run-dir", str(tmp_path / "run"), SLURM_MEM_PER_NODE="1")
    assert result.returncode == 0, str(result)
    told = [line for line in result.stdout.splitlines() if "also in the training set" in line]
    assert len(told) == 1 and "such as sample 0 = sample 3" in told[0]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluated_in_training"]
    assert found == {"found": 2, "compared": 4}
