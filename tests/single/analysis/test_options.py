"""Folders and files that analysis commands are to write: refused in one line before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from analysis import dots, photographs
from analysis.sweeps.options import file_to_write, folder_to_write
from analysis.sweeps.sweep import main
from analysis.tasks import EXPERIMENT


def test_a_folder_may_be_missing_and_a_file_may_be_there(tmp_path: Path) -> None:
    assert folder_to_write(str(tmp_path)) == tmp_path
    assert folder_to_write(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    (tmp_path / "rows.json").write_text("")
    assert file_to_write(str(tmp_path / "rows.json")) == tmp_path / "rows.json"
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder, and must be a file"):
        file_to_write(str(tmp_path))


@pytest.mark.parametrize(
    ("command", "before"),
    [
        (photographs.main, ["--preset", "smoke", "--out"]),
        (dots.main, []),
        (lambda words: main(EXPERIMENT, words), ["--preset", "smoke", "--results"]),
    ],
)
def test_a_folder_below_a_file_is_refused_in_one_line(
    command: object, before: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "results"
    with pytest.raises(SystemExit) as ended:
        command([*before, str(folder)])  # type: ignore[operator]
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert f"{folder} cannot be written: {tmp_path / 'file'} is no folder; choose another" in told
