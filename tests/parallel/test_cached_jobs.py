"""Two jobs at once on one cache directory: each file is built once, and both jobs end as without a cache."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import standing
from tests.parallel.faulted import FAULTY
from tests.parallel.mpirun import mpirun
from tests.parallel.nodes import wait_until
from tests.program import call

pytestmark = [pytest.mark.mpi, pytest.mark.seldom]

TRAIN = (
    *("train", "--data", "digits", "--model", "shufflenet_v2_x0_5", "--image-size", "32", "--train-samples", "128"),
    *("--batch-size", "16", "--epochs", "3", "--freeze", "static", "--cut", "2", "--lr", "0.01", "--augment", "none"),
)


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def train_here(size: int, run: Path, *flags: str) -> dict[str, Any]:
    """Train a small network on the ranks of a standing job and return the run's summary; see workers/faulty.py."""
    result = standing.hvfreeze(size, *TRAIN, "--run-dir", str(run), *flags, program="faulty:-")
    assert result.returncode == 0, str(result)
    return summary(run)


@pytest.mark.standing
@pytest.mark.parametrize("size", [2])
def test_two_jobs_share_a_cache_directory(size: int, tmp_path: Path) -> None:
    cached = ("--cache", "on", "--cache-dir", str(tmp_path / "cache"))
    uncached = train_here(size, tmp_path / "uncached")
    arguments = ["-", *TRAIN, "--run-dir", str(tmp_path / "one"), *cached]
    with ThreadPoolExecutor() as starter:
        job = starter.submit(mpirun, size, FAULTY, args=arguments, timeout=150, every_rank_reports=False)
        # The other job has its ranks already: it comes to the cache when this one does.
        wait_until(lambda: (tmp_path / "one").exists() or job.done(), what="a job that has begun")
        other = train_here(size, tmp_path / "other", *cached)
    assert job.result().returncode == 0, str(job.result())
    both = [summary(tmp_path / "one"), other]
    assert {found["parameter_digest"] for found in both} == {uncached["parameter_digest"]}
    assert sum(found["cache"]["rows_written"] for found in both) == 128, [found["cache"] for found in both]

    verified = call("cache", "verify", str(tmp_path / "cache"))
    assert verified.returncode == 0, str(verified)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".h5"}

    later = train_here(size, tmp_path / "later", *cached)
    assert later["parameter_digest"] == uncached["parameter_digest"]
    assert later["cache"]["rows_written"] == 0
    assert later["cache"]["rows_read"] == 3 * 128
