from __future__ import annotations

import subprocess
import sys

import pytest

from hvfreeze.cli import COMMANDS, build_parser, parse
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import Config, leaves
from tests.program import ROOT

HEAVY = ("torch", "numpy", "horovod", "mpi4py", "h5py", "matplotlib", "hvfreeze.comm", "hvfreeze.training")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["report", "--help"]])
def test_help_comes_without_loading_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hvfreeze", *arguments]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = [line.rpartition("|")[2].strip() for line in said.stderr.splitlines()]
    assert "hvfreeze.config.flags" in loaded
    assert not set(HEAVY) & set(loaded)
    assert "hvfreeze" in said.stdout


def test_every_leaf_is_a_flag_with_its_text_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--help"])
    # Lines are broken at hyphens too.
    said = "".join(capsys.readouterr().out.split())
    for name, (_, leaf, _) in leaves().items():
        assert "--" + name.replace("_", "-") in said
        assert "".join(leaf.metadata["help"].split()) in said, name
    assert (
        "atenthat50%and75%" in said
        and "[0.9;with--strategysubnets:0.0]" in said
        and "[10;with--freezeauto:16;with--strategystale-ring:1]" in said
    )


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


def test_every_command_has_a_parser() -> None:
    known = build_parser().format_help()
    assert all(name in known for name in ("train", *COMMANDS))
