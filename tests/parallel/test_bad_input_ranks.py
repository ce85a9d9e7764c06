"""Whatever is wrong with how ranks are started, or on one of them, ends the job with one message."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.parallel import mpirun, standing
from tests.parallel.mpirun import ROOT, STARTUP, Result
from tests.program import contents, save_photos, spawn

CONFINED = Path(__file__).with_name("workers") / "confined.py"
SMALL = ["--model", "shufflenet_v2_x0_5", "--train-samples", "96", "--batch-size", "16", "--epochs", "1"]
SMALL += ["--threads", "1"]
TINY = "train --model shufflenet_v2_x0_5 --image-size 16 --train-samples 48"
PHOTOS = ["--model", "shufflenet_v2_x0_5", "--data", "imagefolder", "--batch-size", "8"]

pytestmark = pytest.mark.mpi


def refused(result: Any, code: int, *fragments: str) -> None:
    assert result.returncode == code, str(result)
    said = [line for line in result.stderr.splitlines() if line.startswith("hvfreeze: error: ")]
    assert len(said) == 1, str(result)
    assert "Traceback" not in result.stdout + result.stderr, str(result)
    missing = [fragment for fragment in fragments if fragment not in said[0]]
    assert not missing, f"{missing} not in the message\n{result}"


def each_its_own(size: int, arguments: list[str], *each: list[str]) -> Result:
    """Ranks that are started with different arguments after the common ones."""
    return standing.hvfreeze(size, "train", *arguments, each=list(each))


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--batch-size 8 --epoch 2", ["unknown argument '--epoch'; did you mean '--epochs'?"]),
        ("--batch-size 1", ["--batch-size (1)", "BatchNorm"]),
        (
            "--batch-size 8 --strategy grid --parts 2 --micro-batches 8",
            ["--micro-batches (8) of --batch-size (8)", "BatchNorm"],
        ),
    ],
)
def test_what_all_ranks_refuse_is_said_once(run_dir: Path, size: int, words: str, told: list[str]) -> None:
    refused(standing.hvfreeze(size, *TINY.split(), *words.split(), "--run-dir", str(run_dir)), 2, *told)


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize(
    ("first", "second", "fragments"),
    [
        (["--lr", "0.1"], ["--lr", "0.2"], ["optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1", "the same command"]),
        # What one rank alone does before or after training would leave it waiting for the others.
        ([], ["--resume"], ["run.resume is False on rank 0 and True on rank 1"]),
        ([], ["--epoch", "3"], ["rank 1: unknown argument '--epoch'"]),
    ],
)
def test_ranks_with_different_arguments_are_refused(
    size: int, run_dir: Path, first: list[str], second: list[str], fragments: list[str]
) -> None:
    refused(each_its_own(size, [*SMALL, "--run-dir", str(run_dir)], first, second), 2, *fragments)


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_ranks_with_different_data_are_refused(size: int, run_dir: Path, tmp_path: Path) -> None:
    folders = [save_photos(tmp_path / "0"), save_photos(tmp_path / "1", classes="ac")]
    result = each_its_own(
        size, [*PHOTOS, "--run-dir", str(run_dir)], *(["--data-dir", str(folder)] for folder in folders)
    )
    refused(result, 2, "different data", "on rank 0", "on rank 1")


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_other_pixels_in_files_of_equal_names_and_sizes_are_refused(size: int, run_dir: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for shade, folder in enumerate(folders):
        for part, name, number in product(("train", "test"), "ab", range(12)):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (100 + shade, 50, 50)).save(folder / part / name / f"{number:02d}.bmp")
    result = each_its_own(
        size, [*PHOTOS, "--run-dir", str(run_dir)], *(["--data-dir", str(folder)] for folder in folders)
    )
    refused(result, 2, "different pixels", "on rank 0", "on rank 1")


def test_horovod_that_cannot_be_imported_is_said_once(run_dir: Path, tmp_path: Path) -> None:
    stub = tmp_path / "stub" / "horovod"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text('raise ImportError("built for another interpreter")')
    env = {"PYTHONPATH": ":".join(map(str, (stub.parent, STARTUP, ROOT)))}
    result = mpirun.hvfreeze(2, "train", *SMALL, "--run-dir", str(run_dir), env=env)
    refused(result, 2, "2 tasks", "Horovod", "built for another interpreter", "make setup")


def test_tasks_that_mpi_does_not_connect_do_not_become_separate_runs(run_dir: Path) -> None:
    task = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    outcome = spawn("train", *SMALL, "--run-dir", str(run_dir), env={**task, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    refused(outcome, 2, "the launcher started 4 tasks", "but MPI connects only 1", "mpirun")


@pytest.mark.seldom
def test_scripts_that_torchrun_starts_do_not_train_alone() -> None:
    script = (
        "import horovod.torch as hvd; hvd.init()\nimport hvfreeze, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))\n"
        "hvfreeze.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)\n"
    )
    task = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **task, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvfreeze: ")]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert len(lines) == 1 and "the launcher started 2 tasks ($WORLD_SIZE is 2), but MPI connects only 1" in lines[0]


@pytest.mark.standing
@pytest.mark.parametrize("size", [3])
def test_fewer_samples_than_ranks_are_refused(size: int, run_dir: Path, tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos", training=1)
    result = standing.hvfreeze(
        size, "train", *PHOTOS, "--data-dir", str(photos), "--batch-size", "1", "--run-dir", str(run_dir)
    )
    refused(result, 2, "2 training samples for 3 shards")


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_damaged_images_of_all_shards_are_named_in_one_message(size: int, run_dir: Path, tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos")
    # The headers stay whole: only the ranks that decode the images can notice, and there are more than one shard holds.
    images = sorted((photos / "train" / "b").iterdir())[:8]
    for image in images:
        whole = image.read_bytes()
        image.write_bytes(whole[: len(whole) // 2])
    arguments = [*PHOTOS, "--data-dir", str(photos), "--epochs", "1"]
    result = standing.hvfreeze(size, "train", *arguments, "--run-dir", str(run_dir))
    refused(result, 3, "8 images cannot be used", "not an intact image", "--skip-bad", *map(str, images))
    result = standing.hvfreeze(size, "train", *arguments, "--skip-bad", "--run-dir", str(tmp_path / "other"))
    assert result.returncode == 0 and "8 images cannot be decoded and are left out" in result.stdout, str(result)


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_a_run_directory_that_cannot_be_written_is_said_once(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = standing.hvfreeze(size, "train", *SMALL, "--run-dir", str(tmp_path / "file" / "run"))
    refused(result, 2, "--run-dir", str(tmp_path / "file" / "run"), "choose another")
    assert contents(tmp_path) == {"file": b"mine"}


def test_more_ranks_than_cores_run_and_say_so(tmp_path: Path) -> None:
    folder, photos = tmp_path / "run", save_photos(tmp_path / "photos", training=8)
    # One step: each exchange takes as long as the kernel needs to give the core to the other rank.
    arguments = ["train", *PHOTOS, "--data-dir", str(photos), "--epochs", "1", "--run-dir", str(folder)]
    result = mpirun.mpirun(2, CONFINED, timeout=120, args=arguments, env={"OMPI_MCA_mpi_yield_when_idle": None})
    assert result.returncode == 0, str(result)
    notes = [line for line in result.stdout.splitlines() if "2 ranks for 1 core:" in line]
    assert len(notes) == 1, str(result)
    assert notes[0].startswith("note: ")
    assert [rank["yields"] for rank in result.ranks] == ["1", "1"]
    assert (folder / "summary.json").exists()
