from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hvfreeze
from hvfreeze import Config, FreezeConfig
from hvfreeze.config.data import DataConfig
from hvfreeze.config.model import ModelConfig
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.run import RunConfig
from hvfreeze.errors import NumericsError, UsageError
from tests.program import ROOT

PROMISED = {
    "CachedLoader",
    "Config",
    "DistributedOptimizer",
    "FreezeConfig",
    "HvfreezeError",
    "auto",
    "fit_classifier",
    "fit_head",
    "load_model",
    "train",
}


def config(run_dir: Path, *, lr: float = 0.05) -> Config:
    return Config(
        data=DataConfig(train_samples=60),
        model=ModelConfig(model="mlp-16x16"),
        optimizer=OptimizerConfig(epochs=2, batch_size=20, lr=lr),
        freeze=FreezeConfig(freeze="geometric"),
        run=RunConfig(run_dir=str(run_dir), quiet=True, threads=1),
    )


def test_the_promised_names_can_be_listed_and_had() -> None:
    assert set(hvfreeze.__all__) == PROMISED
    assert {*PROMISED, "__version__"} <= set(dir(hvfreeze))
    for name in PROMISED:
        assert getattr(hvfreeze, name).__name__ == name
    assert issubclass(UsageError, hvfreeze.HvfreezeError)


def test_listing_public_names_loads_nothing() -> None:
    code = "import sys, hvfreeze; dir(hvfreeze); print(sorted({'torch', 'numpy', 'h5py'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_other_names_are_in_their_modules() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Reducer'"):
        _ = hvfreeze.Reducer


def test_train_runs_a_configuration_and_returns_its_summary(tmp_path: Path) -> None:
    summary = hvfreeze.train(config(tmp_path / "run"))
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["epochs"], summary["steps"], summary["world_size"]) == (2, 6, 1)
    assert len(hvfreeze.load_model(tmp_path / "run").classes) == 10


def test_train_runs_in_any_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(hvfreeze.train, config(tmp_path / "run")).result()["steps"] == 6


def test_train_raises_what_the_program_would_end_with(tmp_path: Path) -> None:
    with pytest.raises(NumericsError) as told:
        hvfreeze.train(config(tmp_path / "run", lr=1e30))
    assert told.value.exit_code == 5
    with pytest.raises(hvfreeze.HvfreezeError) as refused:
        hvfreeze.train(config(tmp_path / "run"))
    assert refused.value.exit_code in (2, 3)


def test_auto_takes_what_its_command_takes(tmp_path: Path) -> None:
    for settings, words in (
        ({"epoch": 1}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"keep": "best"}, "unknown setting 'keep'"),
        ({"eta_max": 0.1}, "--eta-max needs "),
        ({"data_dir": "photos"}, "--data-dir needs "),
    ):
        with pytest.raises(UsageError, match=words):
            hvfreeze.auto("digits", **settings)
    small: dict[str, Any] = {"model": "tests.kept.small_model:small", "train_samples": 60, "epochs": 1, "threads": 1}
    assert hvfreeze.auto("digits", **small, quiet=True, run_dir=str(tmp_path / "run"))["verbs"]
