"""Two jobs at once on one cache directory: each file is built once, and both jobs end as without a cache."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.faulted import FAULTY
from tests.parallel.mpirun import mpirun
from tests.program import call

pytestmark = [pytest.mark.mpi, pytest.mark.seldom]

TRAIN = (
    *("train", "--data", "digits", "--model", "shufflenet_v2_x0_5", "--image-size", "32", "--train-samples", "128"),
    *("--batch-size", "16", "--epochs", "3", "--freeze", "static", "--cut", "2", "--lr", "0.01", "--augment", "none"),
)


def summary(run: Path, *flags: str) -> dict[str, Any]:
    """Train a small network with two ranks in `run` and return its summary; see workers/faulty.py."""
    arguments = ["-", *TRAIN, "--run-dir", str(run), *flags]
    result = mpirun(2, FAULTY, args=arguments, timeout=150, every_rank_reports=False)
    assert result.returncode == 0, str(result)
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

    verified = call("cache", "verify", str(tmp_path / "cache"))
    assert verified.returncode == 0, str(verified)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".h5"}

    later = summary(tmp_path / "later", *cached)
    assert later["parameter_digest"] == uncached["parameter_digest"]
    assert later["cache"]["rows_written"] == 0
    assert later["cache"]["rows_read"] == 3 * 128
