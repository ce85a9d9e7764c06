"""Which runs a directory's may go on as: what must be the same, and what may differ and is recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.runs.directory import check_directory
from tests.program import contents
from tests.single.runs.starting import ENVIRONMENT, changed, kept, settings, start

INEXACT = {
    "threads": ({}, {"threads": 3}, "threads: 2 before, 3 now"),
    "threads of a rank": ({}, {"threads": [2, 3]}, r"threads: 2 before, \[2, 3\] now"),
    "processor": ({}, {"processor": "Another CPU"}, "processor: Some CPU before, Another CPU now"),
    "kernels": ({}, {"capability": "AVX512"}, "capability: AVX2 before"),
    "torch": ({}, {"versions": {"torch": "2.12.0"}}, "torch: 2.13.0 before, 2.12.0 now"),
    "cache type": ({"cache": "auto", "cache_dtype": "float16"}, {}, "cached as: exact values before, float16"),
}


@pytest.mark.parametrize(("flags", "environment", "reason"), INEXACT.values(), ids=INEXACT)
def test_what_would_not_go_on_exactly_is_refused_or_allowed_and_recorded(
    tmp_path: Path, flags: dict[str, Any], environment: dict[str, Any], reason: str
) -> None:
    start(tmp_path, augment="views:2").close()
    before, flags = contents(tmp_path), {"augment": "views:2", "resume": True, **flags}
    now = changed(**environment)
    with pytest.raises(RefusedError, match=f"cannot continue bit for bit .*{reason}.*--resume-inexact"):
        check_directory(tmp_path, settings(**flags), now)
    assert contents(tmp_path) == before
    record = start(tmp_path, now, **flags, resume_inexact=True)
    record.close()
    held, ran_on = kept(tmp_path)
    assert [note for note in record.notes if note.startswith("changed since the run started: ")]
    assert len(ran_on["resumed"]) == 1 and ran_on["resumed"][0]["changed"]
    assert held["cache"]["cache_dtype"] == flags.get("cache_dtype", "native")
    # Who takes the file for another job has to allow that job the same.
    assert held["run"]["resume"] is held["run"]["resume_inexact"] is False
    # From then on this is what the run is, and its history stays.
    assert start(tmp_path, now, **flags).close() is None
    assert kept(tmp_path)[1]["resumed"] == ran_on["resumed"]


def test_a_rounded_cache_is_not_left_out_silently(tmp_path: Path) -> None:
    start(tmp_path, augment="none", cache="on", cache_dtype="bfloat16").close()
    with pytest.raises(RefusedError, match=r"cached as: bfloat16 \(on\) before, exact values now"):
        check_directory(tmp_path, settings(augment="none", resume=True), ENVIRONMENT)


def test_an_exact_cache_hosts_and_another_size_change_nothing_here(tmp_path: Path) -> None:
    start(tmp_path, augment="none").close()
    now = changed(size=3, threads=9, hosts=["b"] * 3, versions={"h5py": "1.0"})
    flags: dict[str, Any] = {"augment": "none", "resume": True, "cache": "on", "quiet": True, "threads": 7}
    assert check_directory(tmp_path, settings(**flags), now) == []


def test_epochs_may_grow_and_nothing_else_may_change(tmp_path: Path) -> None:
    start(tmp_path, epochs=2).close()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RefusedError, match="epochs: 2 before, 1 now, which is fewer"):
        check_directory(tmp_path, settings(epochs=1, resume=True), ENVIRONMENT)
    way_out = r"run with other settings \(lr: 0.1 before, 0.2 now; seed: 0.*pass the same values again"
    with pytest.raises(RefusedError, match=way_out):
        check_directory(tmp_path, settings(epochs=3, lr=0.2, seed=1, resume=True, resume_inexact=True), ENVIRONMENT)
    record = start(tmp_path, epochs=3, resume=True)
    record.close()
    held, ran_on = kept(tmp_path)
    assert held["optimizer"]["epochs"] == 3 and record.notes == (
        "changed since the run started: epochs: 2 before, 3 now",
    )
    assert ran_on["resumed"][0]["changed"] == ["epochs: 2 before, 3 now"]
    assert not (tmp_path / "summary.json").exists()


def test_what_a_run_without_its_configuration_has_left_is_not_mixed_with_another_run(tmp_path: Path) -> None:
    record = start(tmp_path)
    record.close()
    (tmp_path / "config.yaml").unlink()
    assert check_directory(tmp_path, settings(), ENVIRONMENT) == [], "it has ended before its first step"
    record.metrics({"epoch": 0})
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(
        UsageError, match=r"contains lines and checkpoints of a run, but no config.yaml; .*choose another"
    ):
        check_directory(tmp_path, settings(), ENVIRONMENT)
    assert check_directory(tmp_path, settings(resume=True), ENVIRONMENT) == []


def test_a_run_from_before_a_setting_existed_is_the_run_with_its_default(tmp_path: Path) -> None:
    start(tmp_path).close()
    held = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del held["strategy"], held["run"]["quiet"], held["data"]["shuffle"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(held))
    assert check_directory(tmp_path, settings(resume=True), ENVIRONMENT) == []


@pytest.mark.timeout(20)
def test_a_damaged_run_or_a_pipe_in_its_place_is_refused_by_the_files_name(tmp_path: Path) -> None:
    start(tmp_path).close()
    for name in ("config.yaml", "environment.json"):
        (tmp_path / name).write_text("{")
        with pytest.raises(RefusedError, match=f"{name} is damaged"):
            check_directory(tmp_path, settings(resume=True), ENVIRONMENT)
    (tmp_path / "environment.json").unlink()
    (tmp_path / "config.yaml").unlink()
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(RefusedError, match="it is not a regular file"):
        check_directory(tmp_path, settings(resume=True), ENVIRONMENT)
