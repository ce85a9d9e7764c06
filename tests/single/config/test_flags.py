from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvfreeze.cli import COMMANDS, build_parser, parse
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import Config, fields_of, leaves, settings_of, to_file
from hvfreeze.strategies.registry import STRATEGIES
from tests.program import ROOT

HEAVY = ("torch", "numpy", "horovod", "mpi4py", "h5py", "matplotlib", "hvfreeze.comm.world", "hvfreeze.training.run")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["report", "--help"]])
def test_help_comes_without_loading_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hvfreeze", *arguments]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = [line.rpartition("|")[2].strip() for line in said.stderr.splitlines()]
    assert "hvfreeze.cli" in loaded
    assert not set(HEAVY) & set(loaded)
    assert "hvfreeze" in said.stdout


def shown(capsys: pytest.CaptureFixture[str], command: str) -> str:
    with pytest.raises(SystemExit):
        parse(command.split())
    # Lines are broken at hyphens too.
    return "".join(capsys.readouterr().out.split())


def test_every_setting_is_a_flag_with_its_text_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "train --help-all")
    for name, (_, leaf, _) in leaves().items():
        assert "--" + name.replace("_", "-") in said
        assert "".join(leaf.metadata["help"].split()) in said or name in ("strategy", *OWN), name
    assert "atenthat50%and75%" in said and "cosine[constant]" in said and "ofeachsample)[fresh]" in said


OWN = {name for kind in STRATEGIES.values() for name in fields_of(kind)}


@pytest.mark.parametrize(
    ("flags", "there", "absent"),
    [
        (
            "",
            "--strategy --freeze --cache --lr --fit --keep --resume-inexact",
            "--parts --interval --cut --cache-dir --pool --auto-without --context",
        ),
        ("--strategy grid", "--parts --pipeline --cut-by", "--heads --local-steps --cut-at"),
        ("--freeze coherence", "--interval --min-gain", "--eta-max --cut"),
        ("--freeze=static", "--cut", "--interval"),
        ("--cache on", "--cache-dir", "--interval"),
        ("--head-fit kernel", "--centres --pool", "--lr --schedule"),
        ("--strategy nowhere", "--freeze", "--parts"),
        ("--data text", "--context", "--fit"),
    ],
)
def test_help_shows_what_the_choices_on_the_line_have(
    capsys: pytest.CaptureFixture[str], flags: str, there: str, absent: str
) -> None:
    with pytest.raises(SystemExit):
        parse(["train", *flags.split(), "--help"])
    said = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert set(there.split()) <= said and not set(absent.split()) & said


def test_the_help_of_auto_fits_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(["auto", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 40
    assert "--auto-without" in shown(capsys, "auto --help-all")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_lists_every_exit_code(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    codes = capsys.readouterr().out.partition("exit codes:")[2].split()
    assert {"0", "2", "3", "4", "5", "6", "75", "130", "143"} <= set(codes)


def test_no_flags_are_the_defaults() -> None:
    assert configuration(parse(["train"])) == Config()
    assert configuration(
        parse(["train", "--cache", "auto", "--augment", "none", "--resume", "--run-dir", "x"])
    ).run.resume


def test_a_runs_file_is_for_another_run_unless_that_one_goes_on(tmp_path: Path) -> None:
    saved, own = tmp_path / "config.yaml", tmp_path / "own.yaml"
    saved.write_text(yaml.safe_dump(to_file(configuration(parse(["train", "--run-dir", "a"])))))
    own.write_text("run_dir: a\n")
    for file, more, directory in (
        (saved, [], None),
        (saved, ["--run-dir", "b"], "b"),
        (saved, ["--resume"], "a"),
        (own, [], "a"),
    ):
        assert configuration(parse(["train", "--config", str(file), *more])).run.run_dir == directory, (file, more)


def test_a_run_that_goes_on_has_the_settings_it_began_with_but_for_flags(tmp_path: Path) -> None:
    def settings(*flags: str) -> Config:
        return configuration(parse(["train", "--run-dir", str(tmp_path), *flags]))

    begun = settings("--lr", "0.02", "--epochs", "3", "--freeze", "coherence", "--quiet")
    assert settings("--resume").optimizer.lr == 0.1, "nothing has begun"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_file(begun.resolved())))
    resumed = settings("--resume", "--epochs", "5")
    assert (resumed.optimizer.lr, resumed.optimizer.epochs, resumed.freeze.freeze) == (0.02, 5, "coherence")
    assert resumed.run.resume and resumed.run.run_dir == str(tmp_path) and not resumed.run.quiet
    assert settings("--freeze", "coherence").optimizer.lr == 0.1, "another run, which is refused there"
    assert settings("--resume", "--config", os.devnull).optimizer.lr == 0.1, "a file that is given counts"
    (tmp_path / "config.yaml").write_text("lr: [")
    assert settings("--resume").optimizer.lr == 0.1, "what is wrong is told where the run is looked at"


SAVED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "": [
        ("--optimizer adamw", {"lr": 1e-3, "weight_decay": 1e-2}),
        ("auto", {"optimizer": "auto", "lr": 3e-4, "head_fit": "kernel", "epochs": 16, "batch_size": 32}),
        ("--strategy grid", {"blocks": "residual", "data": "digits"}),
    ],
    "--lr 0.02 --epochs 3": [("--optimizer adamw", {"lr": 0.02, "weight_decay": 1e-2, "epochs": 3})],
    "auto": [
        ("--optimizer sgd", {"lr": 0.1, "weight_decay": 1e-4, "epochs": 16, "schedule": "cosine"}),
        ("--lr 0.01", {"optimizer": "adamw"}),
        ("train --freeze none", {"optimizer": "sgd", "lr": 0.1, "head": "last", "head_fit": "sgd", "epochs": 10}),
    ],
    "auto --head last --lr 0.02": [("--optimizer sgd", {"lr": 0.02, "head": "last", "head_fit": "exact"})],
    "--head multi-level --head-fit exact --augment none": [
        ("auto", {"epochs": 16, "cut": None, "head_fit": "exact", "augment": "none"}),
        ("--head-fit sgd --head last", {"freeze": "none", "cut": None, "epochs": 10}),
    ],
    "--strategy subnets": [("--strategy replicas", {"model": "mlp", "momentum": 0.9})],
    "--strategy grid --parts 1 --freeze linear --interval 7": [
        ("--strategy replicas", {"interval": 7, "freeze": "linear"}),
        ("--freeze none", {"interval": None, "parts": 1}),
    ],
    "--strategy stale-ring": [("--strategy replicas", {"data": "text", "model": "tiny-lm", "epochs": 10, "lr": 0.1})],
    "--freeze static --cut 1 --epochs 1": [
        ("--optimizer lars", {"freeze": "static", "cut": 1, "epochs": 1, "lr": 3.0})
    ],
    "--strategy grid --time-budget 1h": [("--strategy replicas", {"blocks": "stage", "time_budget": "1h"})],
}
"""Flags of a run -> flags given with its config.yaml, and some of the settings that these two make."""


def command_of(flags: str, *, command: str = "train", auto: str = "auto") -> list[str]:
    """The words of a command line, of `command` unless the flags begin with another one."""
    named, _, rest = flags.partition(" ")
    if named in ("auto", "train"):
        return [*(auto if named == "auto" else named).split(), *rest.split()]
    return [*command.split(), *flags.split()]


@pytest.mark.parametrize("first", SAVED)
def test_what_followed_from_a_changed_setting_of_a_saved_run_is_worked_out_anew(tmp_path: Path, first: str) -> None:
    saved = configuration(parse(command_of(first, auto="auto digits"))).resolved()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_file(saved)))

    def again(flags: str) -> Config:
        command = "auto" if first.startswith("auto") else "train"
        words = command_of(flags, command=command)
        return configuration(parse([*words, "--config", str(tmp_path / "config.yaml")])).resolved()

    assert again("") == saved
    for flags, wanted in SAVED[first]:
        made = settings_of(again(flags))
        assert {name: made[name] for name in wanted} == wanted, flags


def test_every_setting_of_a_file_that_no_run_wrote_is_meant(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("optimizer: {epochs: 10, lr: 0.1}")
    made = configuration(parse(["auto", "digits", "--config", str(tmp_path / "own.yaml")]))
    assert (made.optimizer.epochs, made.optimizer.lr, made.optimizer.batch_size) == (10, 0.1, 32)


def test_every_command_has_a_parser() -> None:
    known = build_parser().format_help()
    assert all(name in known for name in ("train", *COMMANDS))
