from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvfreeze.cli import COMMANDS, parse
from hvfreeze.config.flags import choices_in, configuration, flag_of
from hvfreeze.config.registry import STRATEGIES
from hvfreeze.config.section import By
from hvfreeze.config.tree import Config, fields_of, from_dict, leaves, settings_of, to_file
from hvfreeze.errors import UsageError
from tests.program import ROOT

VALUES = {"test_table": "a.csv", "metric": "accuracy"}
HEAVY = ("torch", "numpy", "horovod", "mpi4py", "h5py", "matplotlib", "hvfreeze.comm.world", "hvfreeze.training.run")


@pytest.mark.parametrize("command", ["--help", "train --help"])
def test_help_comes_without_loading_torch(command: str) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "hvfreeze", *command.split()]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = [line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()]
    assert "hvfreeze.cli" in loaded and not set(HEAVY) & set(loaded) and "hvfreeze" in shown.stdout
    assert {"0", "2", "3", "4", "5", "6", "75", "130", "143"} <= set(shown.stdout.partition("exit codes:")[2].split())
    assert command != "--help" or all(name in shown.stdout for name in ("train", *COMMANDS))


def help_of(capsys: pytest.CaptureFixture[str], command: str) -> str:
    with pytest.raises(SystemExit):
        parse(command.split())
    return capsys.readouterr().out


def test_every_setting_is_a_flag_with_its_text_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    # Lines are broken at hyphens too.
    shown, own = (
        "".join(help_of(capsys, "train --help-all").split()),
        {name for kind in STRATEGIES.values() for name in fields_of(kind)},
    )
    for name, (_, leaf, _) in leaves().items():
        assert flag_of(name) in shown
        assert "".join(leaf.metadata["help"].split()) in shown or name == "strategy" or name in own, name
    assert "atenthat50%and75%" in shown and "cosine[constant]" in shown and "ofeachsample)[fresh]" in shown


def test_the_help_of_auto_fits_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(capsys, "auto --help")
    assert len(shown.splitlines()) <= 40
    for default in ("[resnet18]", "images [16]", "step; default: chosen", "steps as in 200steps [auto]", "seed [0]"):
        assert default in shown, shown
    whole = " ".join(help_of(capsys, "auto --help-all").split())
    assert "--auto-without" in whole and "in epochs of full fine-tuning [16]" in whole
    assert "backward pass; default: chosen" in whole and "backward pass [128]" in help_of(capsys, "train --help")


@pytest.mark.parametrize(
    ("flags", "there", "absent"),
    [
        ("", "strategy freeze lr fit keep resume-inexact", "parts interval cut cache-dir pool auto-without context"),
        ("--strategy grid", "parts pipeline cut-by", "heads local-steps cut-at"),
        ("--strategy shared-trunk --cut-by given", "heads cut-at", "critic-every"),
        ("--freeze coherence", "interval min-gain", "eta-max cut"),
        ("--freeze=static", "cut", "interval"),
        ("--shadow percentile", "interval eta-max signal", "min-gain cut"),
        ("--cache on", "cache-dir", "interval"),
        ("--head-fit kernel", "centres pool flips", "lr schedule epochs"),
        ("--optimizer adamw", "lr", "nesterov"),
        ("--augment none", "lr", "recipe flips"),
        ("--data text", "context", "fit image-size"),
        ("--data photos.csv", "split-column", "context"),
    ],
)
def test_help_shows_the_flags_of_the_choices_on_the_line_which_are_those_it_accepts(
    capsys: pytest.CaptureFixture[str], flags: str, there: str, absent: str, tmp_path: Path
) -> None:
    shown = set(re.findall(r"^  (--[a-z-]+)", help_of(capsys, f"train {flags} --help"), re.MULTILINE))
    assert {*map(flag_of, there.split())} <= shown and not {*map(flag_of, absent.split())} & shown
    given = {**choices_in(flags.split()), "run_dir": str(tmp_path)}
    for name, (_, leaf, _) in leaves().items():
        value = VALUES.get(name, 1) if isinstance(leaf.default, By | None) else leaf.default
        message = ""
        try:
            from_dict({name: value, **{leaf: entry for leaf, entry in given.items() if entry is not None}})
        except UsageError as refusal:
            message = str(refusal)
        unknown = message.startswith(f"{flag_of(name)} needs ")
        # One that is given together with another one.
        assert unknown != (flag_of(name) in shown) or name in ("mean", "std"), (name, message)


def test_a_runs_file_is_for_another_run_unless_that_one_goes_on(tmp_path: Path) -> None:
    assert configuration(parse(["train"])) == Config()
    saved, own = tmp_path / "config.yaml", tmp_path / "own.yaml"
    saved.write_text(yaml.safe_dump(to_file(configuration(parse(["train", "--run-dir", "a"])))))
    own.write_text("run_dir: a\noptimizer: {epochs: 10, lr: 0.1}")
    runs = {(saved, ""): None, (saved, "--run-dir b"): "b", (saved, "--resume"): "a", (own, ""): "a"}
    for (file, more), directory in runs.items():
        assert configuration(parse(["train", "--config", str(file), *more.split()])).run.run_dir == directory, more
    # Every setting of a file that no run wrote was given, although it has the default of train.
    made = configuration(parse(["auto", "digits", "--config", str(own)])).optimizer
    assert (made.epochs, made.lr, made.batch_size) == (10, 0.1, 32)


def test_a_run_that_goes_on_has_the_settings_it_began_with_but_for_flags(tmp_path: Path) -> None:
    def settings(flags: str) -> Config:
        return configuration(parse(["train", "--run-dir", str(tmp_path), *flags.split()]))

    begun = to_file(settings("--lr 0.02 --epochs 3 --freeze coherence --quiet").resolved())
    assert settings("--resume").optimizer.lr == 0.1, "nothing has begun"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(begun))
    resumed = settings("--resume --epochs 5")
    assert (resumed.optimizer.lr, resumed.optimizer.epochs, resumed.freeze.freeze) == (0.02, 5, "coherence")
    assert resumed.run.resume and resumed.run.run_dir == str(tmp_path) and not resumed.run.quiet
    assert settings("--freeze coherence").optimizer.lr == 0.1, "another run, which is refused there"
    assert settings(f"--resume --config {os.devnull}").optimizer.lr == 0.1, "a file that is given counts"
    earlier = begun | {"data": begun["data"] | {"augment": "none", "flips": "off"}, "given": ["augment", "flips"]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier))
    assert settings("--resume").data.flips == "off", "an earlier version accepted it, and it makes the same run"
    (tmp_path / "config.yaml").write_text("lr: [")
    assert settings("--resume").optimizer.lr == 0.1, "what is wrong is told where the run is looked at"


SAVED: dict[str, dict[str, dict[str, Any]]] = {
    "train": {
        "train --optimizer adamw": {"lr": 1e-3, "weight_decay": 1e-2},
        "train --strategy grid": {"blocks": "residual", "data": "digits"},
        "auto": {"optimizer": "auto", "lr": 3e-4, "head_fit": "kernel", "epochs": 16, "batch_size": 32},
    },
    "train --lr 0.02 --epochs 3": {"train --optimizer adamw": {"lr": 0.02, "weight_decay": 1e-2, "epochs": 3}},
    "auto digits": {
        "auto --optimizer sgd": {"lr": 0.1, "weight_decay": 1e-4, "epochs": 16, "schedule": "cosine"},
        "auto --lr 0.01": {"optimizer": "adamw"},
        "train --freeze none": {"optimizer": "sgd", "lr": 0.1, "head": "last", "head_fit": "sgd", "epochs": 10},
    },
    "auto digits --head last --lr 0.02": {"auto --optimizer sgd": {"lr": 0.02, "head": "last", "head_fit": "exact"}},
    "train --head multi-level --head-fit exact --augment none": {
        "auto": {"epochs": 16, "cut": None, "head_fit": "exact", "augment": "none"},
        "train --head-fit sgd --head last": {"freeze": "none", "cut": None, "epochs": 10},
    },
    "train --strategy grid --parts 1 --freeze linear --interval 7": {
        "train --strategy replicas": {"interval": 7, "freeze": "linear"},
        "train --freeze none": {"interval": None, "parts": 1},
    },
    "train --strategy stale-ring": {"train --strategy replicas": {"data": "text", "model": "tiny-lm", "lr": 0.1}},
    "train --freeze static --cut 1 --epochs 1": {"train --optimizer lars": {"cut": 1, "epochs": 1, "lr": 3.0}},
    "train --strategy subnets --time-budget 1h": {"train --strategy grid": {"momentum": 0.9, "time_budget": "1h"}},
}
"""The command of a run -> commands given with its config.yaml, and some of the settings that these two make."""


@pytest.mark.parametrize("first", SAVED)
def test_settings_that_follow_from_a_changed_one_of_a_saved_run_are_computed_anew(tmp_path: Path, first: str) -> None:
    saved = configuration(parse(first.split())).resolved()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_file(saved)))
    for command, wanted in {first.split()[0]: settings_of(saved), **SAVED[first]}.items():
        words = [*command.split(), "--config", str(tmp_path / "config.yaml")]
        found = settings_of(configuration(parse(words)).resolved())
        assert {name: found[name] for name in wanted} == wanted, command
