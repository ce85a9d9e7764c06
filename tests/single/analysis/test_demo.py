from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis import demo
from analysis.demo import StageError, comparison_table, environment, launch, run_stage
from analysis.parts import demo_stages
from analysis.parts.demo_stages import Stage, chosen_ids, plan, write_images
from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration
from hvfreeze.data.data_sets import open_data
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.runs.reading import load_runs
from tests.single.report.run_directories import vote, write_run


def test_the_halves_hold_the_same_pixels_as_the_digits(tmp_path: Path) -> None:
    write_images(open_data("digits"), classes=range(8, 10), folder=tmp_path)
    folder, digits = open_data("imagefolder", tmp_path), open_data("digits")
    assert folder.train.classes == ("8", "9")
    for written, known in ((folder.train, digits.train), (folder.test, digits.test)):
        # A folder is sorted by class, then by sample.
        order = [sample for sample in torch.argsort(known.labels, stable=True).tolist() if known.labels[sample] >= 8]
        assert written.labels.tolist() == (known.labels[order] - 8).tolist()
        assert all(np.array_equal(written.decode(row), known.decode(sample)) for row, sample in enumerate(order))


def test_at_most_so_many_images_of_a_class_are_chosen() -> None:
    images = open_data("digits").test
    chosen = chosen_ids(images, frozenset((2, 3)), most=4)
    assert sorted(images.labels[chosen].tolist()) == [2] * 4 + [3] * 4
    assert len(chosen_ids(images, frozenset(range(10)), most=None)) == len(images)


@pytest.mark.parametrize(("weights", "cifar"), [(None, False), (Path("some.pt"), True)])
def test_the_program_takes_every_stages_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar: bool, weights: Path | None
) -> None:
    if cifar:
        monkeypatch.setattr(demo_stages, "open_data", lambda name, directory=None: open_data("digits"))
    stages = plan(tmp_path, data_dir=tmp_path if cifar else None, weights=weights)
    configs = [
        configuration(parse([*stage.command, *stage.flags, "--run-dir", str(stage.run_dir)])) for stage in stages
    ]
    assert [stage.run_dir.name for stage in stages] == ["pretrained", "full", "voted", "cached", "auto"][
        0 if weights is None else 1 :
    ]
    full, voted, cached, auto = configs[-4:]
    assert (full.data, full.optimizer, full.model) == (voted.data, voted.optimizer, voted.model)
    assert (voted.data, voted.optimizer, voted.freeze) == (cached.data, cached.optimizer, cached.freeze)
    assert (voted.cache.cache, cached.cache.cache) == ("off", "auto")
    assert (auto.freeze.freeze, auto.head.head, auto.optimizer.epochs) == ("auto", "multi-level", 16)
    assert (auto.data.data_dir, auto.data.train_samples) == (full.data.data_dir, full.data.train_samples)
    assert full.model.weights == str(weights or tmp_path / "pretrained" / "model.pt")
    assert (full.freeze.freeze, full.cache.cache) == ("none", "off")
    assert voted.freeze.freeze not in ("none", "static")
    assert full.data.data == ("cifar10" if cifar else "imagefolder")


def test_several_ranks_are_started_with_horovodrun_and_one_alone() -> None:
    assert launch(2, ["train"]) == ["horovodrun", "-np", "2", "-H", "localhost:2", "hvfreeze", "train"]
    assert launch(1, ["train"]) == ["hvfreeze", "train"]


def test_programs_of_this_environment_come_first_and_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = environment(2)
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert (found["OMP_NUM_THREADS"], found["OMPI_MCA_mpi_yield_when_idle"]) == ("3", "1")
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in found
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert environment(2)["OMPI_ALLOW_RUN_AS_ROOT"] == environment(2)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def stage_that(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Stage:
    monkeypatch.setattr(demo, "launch", lambda ranks, arguments: [sys.executable, "-c", script])
    return Stage(title="a stage", run_dir=folder / "run", flags=())


def test_a_stage_that_fails_stops_the_demo_with_the_programs_code_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print('[1,0]<stderr>:hvfreeze: error: no such data'); print('launcher talk'); raise SystemExit(3)"
    stage = stage_that(monkeypatch, tmp_path, script)
    with pytest.raises(StageError, match="'a stage' failed with exit code 3") as caught:
        run_stage(stage, ranks=2)
    assert caught.value.exit_code == 3
    assert "hvfreeze: error: no such data" in str(caught.value) and "launcher talk" not in str(caught.value)
    assert "launcher talk" in (tmp_path / "run.log").read_text()


def test_only_rank_0s_progress_is_shown_while_a_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ("[1,0]<stdout>:epoch 0 | done[1,0]<stdout>:", "epoch 1", "[1,1]<stdout>:epoch 2", "[1,0]<stderr>:a warning")
    run_stage(stage_that(monkeypatch, tmp_path, f"print(*{said}, sep='\\n')"), ranks=2)
    assert capfd.readouterr().out.splitlines()[:-1] == ["  epoch 0 | done", "  epoch 1"]


def test_what_would_fail_later_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--out"):
        demo.check(tmp_path, ranks=1, weights=None)
    with pytest.raises(UsageError, match="--ranks"):
        demo.check(tmp_path / "new", ranks=0, weights=None)
    with pytest.raises(UsageError, match="--weights"):
        demo.check(tmp_path / "new", ranks=1, weights=tmp_path / "absent.pt")
    monkeypatch.setattr(demo.shutil, "which", lambda name, path: None)
    with pytest.raises(RefusedError, match="make setup"):
        demo.check(tmp_path / "new", ranks=2, weights=None)
    demo.check(tmp_path / "new", ranks=1, weights=None)


def test_the_table_compares_time_gain_accuracy_and_cuts(tmp_path: Path) -> None:
    decisions = [vote(20, before=0, after=2, proposals=[2, 2], weights=[1.0, 1.0])]
    paths = [
        write_run(tmp_path / "full", accuracies=[0.5, 0.95, 0.9]),
        write_run(tmp_path / "voted", accuracies=[0.5, 0.6, 0.9], speed=2.0, freeze="linear", decisions=decisions),
    ]
    table = comparison_table(load_runs(paths))
    assert table.columns == ("2 ranks", "full", "voted")
    rows = {name: cells for name, *cells in table.rows}
    assert rows["training time"] == ["11.5 s", "5.77 s"]
    assert rows["- forward"] == ["3.00 s", "1.50 s"]
    assert rows["speed-up"] == ["1.00x", "2.00x"]
    assert rows["time saved"] == ["0.0 %", "50.0 %"]
    assert rows["test accuracy, best epoch"] == ["95.0 %", "90.0 %"]
    assert rows["cut (epoch of the change)"] == ["0", "0, 2 (1)"]
