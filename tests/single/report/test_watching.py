"""`hvfreeze report --watch`: the page is written anew while a job is at work, and a last time when it has ended."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.report import report
from tests.single.report.run_directories import write_run


def watched(monkeypatch: pytest.MonkeyPatch, place: Path, out: Path, *epochs: int) -> list[str]:
    """Watch a run that makes one more of `epochs` at each look, and ends; return the page after each."""
    pages: list[str] = []
    rest = list(epochs)

    def look_again(seconds: float) -> None:
        assert seconds == 7
        pages.append((out / "index.html").read_text() if (out / "index.html").exists() else "")
        make(rest.pop(0) if rest else epochs[-1])

    def make(count: int) -> None:
        lines = write_run(out.parent / f"{count}", accuracies=[0.5] * max(1, count), epochs=3, finished=count == 3)
        place.mkdir(exist_ok=True)
        for file in lines.iterdir():
            (place / file.name).write_bytes(b"" if count == 0 and file.suffix == ".jsonl" else file.read_bytes())

    # The module's own: other threads of this process sleep too.
    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=look_again, strftime=time.strftime))
    monkeypatch.setattr(report, "doing", lambda folder: "running" if rest else "stopped")
    make(rest.pop(0))
    assert report.watch_report([place], out=out, seconds=7) == 0
    return [*pages, (out / "index.html").read_text()]


@pytest.mark.usefixtures("undrawn")
def test_the_page_follows_a_run_from_before_its_first_epoch_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing, first, second, last = watched(monkeypatch, tmp_path / "run", tmp_path / "out", 0, 1, 2, 3)
    assert nothing == "" and "1 of 3 epochs" in first and "2 of 3 epochs" in second
    reload = '<meta http-equiv="refresh" content="7">'
    assert reload in first and reload in second and reload not in last and "not finished" not in last
    assert capsys.readouterr().out.count("report on 1 run") == 3


def test_nothing_to_watch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="does not exist"):
        report.watch_report([tmp_path / "none"], out=tmp_path / "out", seconds=1)
    with pytest.raises(UsageError, match=r"--watch \(0\)"):
        report.watch_report([tmp_path], out=tmp_path / "out", seconds=0)
