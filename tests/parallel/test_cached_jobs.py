"""Two jobs at once on one cache directory: each file is built once, and both jobs end as without a cache."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.faulted import FAULTY
from tests.parallel.mpirun import Result, hvfreeze, mpirun

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

TRAIN = (
    *("train", "--data", "digits", "--model", "shufflenet_v2_x0_5", "--image-size", "32", "--train-samples", "128"),
    *("--batch-size", "16", "--epochs", "3", "--freeze", "static", "--cut", "2", "--lr", "0.01", "--augment", "none"),
)


def train(ranks: int, run: Path, *flags: str) -> Result:
    """Run the program with a small network; see workers/faulty.py."""
    arguments = ["-", *TRAIN, "--run-dir", str(run), *flags]
    result = mpirun(ranks, FAULTY, args=arguments, timeout=150, every_rank_reports=False)
    assert result.returncode == 0, str(result)
    return result


def summary(run: Path, *flags: str) -> dict[str, Any]:
    """Train with two ranks in `run` and return its summary."""
    train(2, run, *flags)
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def test_two_jobs_share_a_cache_directory(tmp_path: Path) -> None:
    cached = ("--cache", "on", "--cache-dir", str(tmp_path / "cache"))
    with ThreadPoolExecutor() as starters:
        jobs = [starters.submit(summary, tmp_path / name, *cached) for name in ("one", "other")]
        both = [job.result() for job in jobs]
    uncached = summary(tmp_path / "uncached")
    assert {found["parameter_digest"] for found in both} == {uncached["parameter_digest"]}
    assert sum(found["cache"]["rows_written"] for found in both) == 128, [found["cache"] for found in both]

    verified = hvfreeze(1, "cache", "verify", str(tmp_path / "cache"))
    assert verified.returncode == 0, str(verified)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".h5"}

    later = summary(tmp_path / "later", *cached)
    assert later["parameter_digest"] == uncached["parameter_digest"]
    assert later["cache"]["rows_written"] == 0
    assert later["cache"]["rows_read"] == 3 * 128


def test_ranks_without_evaluation_samples_cache_like_the_others(tmp_path: Path) -> None:
    few = ("--validation-fraction", "0.016")
    found = {}
    for mode in ("on", "off"):
        result = train(3, tmp_path / mode, *few, "--cache", mode)
        found[mode] = json.loads((tmp_path / mode / "summary.json").read_text())
    assert "2 training samples are held out" in result.stdout, "each rank has one: this test says nothing"
    assert found["on"]["parameter_digest"] == found["off"]["parameter_digest"]
    assert found["on"]["test_accuracy"] == found["off"]["test_accuracy"]
    assert found["on"]["cache"]["rows_read"] > 0


def test_ranks_that_meet_all_samples_share_what_each_has_computed(tmp_path: Path) -> None:
    flags = ("--shuffle", "global", "--epochs", "2")
    shared = ("--cache", "on", "--cache-shared", "--cache-dir", str(tmp_path / "cache"))
    uncached = summary(tmp_path / "uncached", *flags)
    for name, written in (("first", 128), ("later", 0)):
        found = summary(tmp_path / name, *flags, *shared)
        assert found["parameter_digest"] == uncached["parameter_digest"]
        assert found["cache"]["exact"] is True
        assert found["cache"]["rows_written"] == written, found["cache"]
        assert found["cache"]["rows_read"] == 2 * 128
