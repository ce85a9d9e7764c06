"""What training samples say of mirror images, all ranks hear alike, whoever of them has the samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.parallel.sizes import seldom
from tests.parallel.standing import hvfreeze
from tests.program import call

pytestmark = [pytest.mark.mpi, pytest.mark.standing]

SMALL = ("--model", "tests.kept.small_model:small", "--batch-size", "4", "--epochs", "1", "--quiet")


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with a bright bar on the left, or on the right."""
    root, random = tmp_path_factory.mktemp("sides"), np.random.default_rng(0)
    for part in ("train", "test"):
        for name, first in (("left", 1), ("right", 18)):
            (root / part / name).mkdir(parents=True)
            for number in range(24):
                pixels = random.integers(0, 60, (32, 32, 3)).astype(np.uint8)
                start = first + random.integers(0, 9)
                pixels[:, start : start + 4] = 220
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def found(size: int, sides: Path, run: Path, *flags: str) -> dict[str, Any]:
    command = ("train", *SMALL, "--data", "imagefolder", "--data-dir", str(sides), "--run-dir", str(run), *flags)
    result = call(*command) if size == 1 else hvfreeze(size, *command)
    assert result.returncode == 0, str(result)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())["mirror"]
    return summary


@pytest.fixture(scope="module")
def alone(sides: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(1, sides, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("shuffle", ["shard", seldom("global")])
def test_all_ranks_together_find_out_what_one_does(
    size: int, shuffle: str, sides: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    together = found(size, sides, tmp_path / "together", "--shuffle", shuffle)
    assert together["taken"] is alone["taken"] is False
    assert together["samples"] == alone["samples"] == 48
    assert together["loss_without"] == pytest.approx(alone["loss_without"], rel=1e-3)


@pytest.mark.parametrize("size", [2])
def test_ranks_that_read_no_samples_hear_it_too(size: int, sides: Path, tmp_path: Path) -> None:
    parted = found(size, sides, tmp_path / "parted", "--strategy", "grid", "--parts", "2", "--micro-batches", "1")
    assert parted["taken"] is False and parted["samples"] == 48


@pytest.mark.parametrize("size", [seldom(3)])
def test_a_head_on_the_mean_over_them_is_equal_on_all_ranks_and_with_a_cache(
    size: int, sides: Path, tmp_path: Path
) -> None:
    """Equal on all ranks: a run whose replicas differ ends in an error."""
    cached = ("--cache", "on", "--cache-dir", str(tmp_path / "cache"))
    digests = []
    for name, more in (("plain", ()), ("filled", cached), ("read", cached)):
        run = tmp_path / name
        result = hvfreeze(size, "auto", str(sides), *SMALL, "--flips", "mean", *more, "--run-dir", str(run))
        assert result.returncode == 0, str(result)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["head"]["rows"] == 48, "mirror images are no rows"
        digests.append(summary["parameter_digest"])
    assert len(set(digests)) == 1
