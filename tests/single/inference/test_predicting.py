"""`hvfreeze predict`: the answers of the run's own evaluation, for files and folders, or one message."""

from __future__ import annotations

import csv
import io
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hvfreeze
from hvfreeze.errors import RefusedError
from hvfreeze.inference.card import Preparation
from hvfreeze.inference.predict import table_at
from hvfreeze.report.tables import to_csv
from tests.program import call
from tests.single.inference.conftest import CLASSES, Finished
from tests.single.refusing import refused


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_test_images_give_the_accuracy_that_the_run_reported(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "new" / "answers.csv"
    outcome = call("predict", str(finished.run), str(finished.images / "test"), "--out", str(out), "--top", "3")
    assert outcome.returncode == 0 and outcome.stdout == f"21 images of 3 classes: {out}\n", str(outcome)
    rows = rows_of(out.read_text())
    assert [Path(row["path"]) for row in rows] == sorted((finished.images / "test").rglob("*.png"))
    assert len({row["class"] for row in rows}) > 1, "a model that answers one class alone proves little"
    right = [Path(row["path"]).parent.name == row["class"] for row in rows]
    assert sum(right) / len(right) == finished.summary["test_accuracy"]
    for row in rows:
        told = [row["class"], row["class_2"], row["class_3"]]
        numbers = [float(row[f"probability{place}"]) for place in ("", "_2", "_3")]
        assert sorted(told) == sorted(CLASSES) and numbers == sorted(numbers, reverse=True)
        assert sum(numbers) == pytest.approx(1, abs=2e-6)


def test_rows_are_the_models_own_probabilities(finished: Finished) -> None:
    applied = hvfreeze.load_model(finished.run)
    path = finished.images / "test" / "red" / "01.png"
    with Image.open(path) as image:
        logits = applied.logits(torch.stack([applied.transform(image)] * 8))[0]
    outcome = call("predict", str(finished.run), str(path))
    best = int(logits.argmax())
    shown = round(float(logits.double().softmax(0)[best]), 6)
    assert outcome.stdout == f"path,class,probability\n{path},{applied.classes[best]},{shown}\n", str(outcome)


def test_files_and_folders_come_in_the_order_named_in_batches_of_any_size(finished: Finished) -> None:
    named = [str(finished.images / "test" / part) for part in ("red/02.png", "blue", "red/02.png")]
    outcomes = [call("predict", str(finished.run), *named, "--batch-size", size) for size in ("1", "4")]
    rows = [rows_of(outcome.stdout) for outcome in outcomes]
    assert [row["path"] for row in rows[0]][:2] == [named[0], f"{named[1]}/00.png"] and len(rows[0]) == 9
    assert rows[0][0] == rows[0][-1]
    for other in rows[1:]:
        assert [row["class"] for row in other] == [row["class"] for row in rows[0]]


def test_another_folder_gives_the_same_answers(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.images / "test" / "green", tmp_path / "green")
    (tmp_path / "green" / "notes.txt").write_text("no image")
    there = call("predict", str(finished.run), str(tmp_path / "green"))
    monkeypatch.chdir(tmp_path)
    here = call("predict", str(finished.run), "green")
    assert here.returncode == 0 and here.stdout == there.stdout.replace(f"{tmp_path}/", ""), str(here)


def test_files_of_a_folder_that_are_no_images_by_their_suffix_are_told(finished: Finished, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished.images / "test", tmp_path / "photos"))
    for name in ("green/1.heic", "red/1.HEIC", "red/1.avif"):
        (folder / name).touch()
    told = f"{folder}: 3 files skipped, not images by their suffix: .heic (2), .avif (1)"
    predicted = call("predict", str(finished.run), str(folder))
    assert predicted.stderr == f"hvfreeze: note: {told}\n" and len(rows_of(predicted.stdout)) == 21
    assert told in call("evaluate", str(finished.run), "--data-dir", str(folder)).stdout
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "1.heic").touch()
    refused(call("predict", str(finished.run), str(tmp_path / "empty")), 3, "but .heic (1)")


def test_names_that_are_no_text_are_kept_in_files_and_shown_somehow(finished: Finished, tmp_path: Path) -> None:
    odd = tmp_path / "b\udcff,\n\r.png"
    shutil.copy(finished.images / "test" / "red" / "00.png", odd)
    out = tmp_path / "out.csv"
    assert call("predict", str(finished.run), str(odd), "--out", str(out)).returncode == 0
    with out.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == [str(odd)]
    outcome = call("predict", str(finished.run), str(tmp_path))
    assert outcome.returncode == 0 and "\udcff" not in outcome.stdout and "b" in rows_of(outcome.stdout)[0]["path"]


@pytest.fixture
def some_bad(finished: Finished, tmp_path: Path) -> tuple[list[Path], list[Path]]:
    """Whole images, and damaged ones and a link to one that is gone, which come between them."""
    whole = (finished.images / "test" / "red" / "00.png").read_bytes()
    paths = [tmp_path / "images" / f"{number:02d}.png" for number in range(20)]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        path.write_bytes(whole if number % 3 else whole[: len(whole) // 2])
    paths[18].unlink()
    paths[18].symlink_to("nowhere.png")
    return paths[1::3] + paths[2::3], paths[::3]


@pytest.mark.parametrize("skip_bad", [False, True])
def test_bad_images_cost_no_other_its_answer_and_are_named_at_the_end(
    finished: Finished, some_bad: tuple[list[Path], list[Path]], tmp_path: Path, skip_bad: bool
) -> None:
    good, bad = some_bad
    out, flags = tmp_path / "out.csv", ["--skip-bad"] if skip_bad else []
    for arguments in [["--batch-size", "2"]] if skip_bad else [["--out", str(out)]]:
        outcome = call("predict", str(finished.run), str(good[0].parent), *arguments, *flags)
        text = out.read_text() if out.exists() else outcome.stdout
        assert [row["path"] for row in rows_of(text)] == sorted(map(str, good)), str(outcome)
        assert len({(row["class"], row["probability"]) for row in rows_of(text)}) == 1, "all are the same image"
        assert outcome.returncode == (0 if skip_bad else 3) and len(outcome.messages) == (0 if skip_bad else 1)
        assert all(path.name in outcome.stderr for path in bad) and "Traceback" not in outcome.stderr
    refused(call("predict", str(finished.run), str(bad[0]), *flags), 3, "00.png is not an intact image")


def test_a_name_with_a_line_end_is_one_column_of_every_batch() -> None:
    rows = [{"path": "a.png", "price\n(EUR)": "1.5"}]
    text = to_csv(rows) + to_csv(rows, header=False)
    assert rows_of(text) == [*rows, *rows]


def test_answers_are_written_as_they_come(
    finished: Finished, some_bad: tuple[list[Path], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written, decode = tmp_path / "out.csv", [], Preparation.pixels_of

    def pixels_of(self: Preparation, path: Path, *rest: Any) -> Any:
        if path.name == "19.png":
            written.append(len(out.read_text().splitlines()))
            raise KeyboardInterrupt
        return decode(self, path, *rest)

    monkeypatch.setattr(Preparation, "pixels_of", pixels_of)
    monkeypatch.setattr("hvfreeze.inference.answers.AHEAD", 4)
    words = [str(finished.run), str(some_bad[0][0].parent), "--batch-size", "2", "--out", str(out)]
    assert call("predict", *words).returncode == 130
    assert 5 < written[0] <= len(out.read_text().splitlines()) <= 13


def test_a_disk_that_is_full_in_the_middle_of_a_batch_is_told(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(RefusedError, match="cannot be written"), table_at(tmp_path / "out.csv") as write:
            write("a line\n" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("RUN nowhere.png", 3, "nowhere.png does not exist"),
        ("RUN empty", 3, "empty holds no image (.bmp"),
        ("RUN notes.txt", 3, "notes.txt is not an intact image"),
        ("RUN good.png --top 4", 2, "--top (4) must be at most 3"),
        ("RUN good.png --batch-size 0", 2, "--batch-size (0) must be at least 1"),
        ("RUN good.png --out empty", 2, "--out (empty) must be a file"),
        ("empty good.png", 3, "empty holds no finished model"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_one_message(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no image")
    whole = (finished.images / "test" / "red" / "00.png").read_bytes()
    (tmp_path / "good.png").write_bytes(whole)
    (tmp_path / "bad.png").write_bytes(whole[: len(whole) // 2])
    words = [str(finished.run) if word == "RUN" else word for word in arguments.split()]
    refused(call("predict", *words), code, message)
