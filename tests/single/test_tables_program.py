"""A table of labels through the program: trained on, resumed, cached, evaluated, predicted, and refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.program import Outcome, call
from tests.single.refusing import refused

SMALL = ["--model", "mlp-16x16", "--batch-size", "8", "--epochs", "1", "--threads", "1"]


def photos(folder: Path) -> Path:
    """A table of images of two shades, and of one that is in both splits."""
    lines = ["file,species,part"]
    for number in range(40):
        name, kind = f"{number:02d}.png", number % 2
        pixels = np.random.default_rng(number).integers(100 * kind, 100 * kind + 100, (16, 16, 3), dtype=np.uint8)
        (folder / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "images" / name)
        lines.append(f"images/{name},{('dark', 'light')[kind]},{'test' if number >= 32 else 'train'}")
    (folder / "copy.png").write_bytes((folder / "images" / "00.png").read_bytes())
    table = folder / "labels.csv"
    table.write_text("\n".join([*lines, "copy.png,dark,test"]))
    return table


COLUMNS = ["--label-column", "species", "--split-column", "part"]


def test_a_run_on_a_table_trains_resumes_evaluates_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, run = photos(tmp_path), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    made = call("train", *SMALL, "--data", "labels.csv", *COLUMNS, "--run-dir", str(run))
    assert made.returncode == 0, str(made)
    assert "32 training images, 9 test images, 2 classes" in made.stdout
    assert "of 9 evaluation images, 1 is also in the training set" in made.stdout
    # From elsewhere: config.yaml has the table's whole path.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = call("train", "--run-dir", str(run), "--resume", "--epochs", "2")
    assert again.returncode == 0 and "resumed after step 4" in again.stdout, str(again)
    judged = call("evaluate", str(run))
    assert judged.returncode == 0 and "as the run reported" in judged.stdout, str(judged)
    other = call("evaluate", str(run), "--data-dir", str(table))
    assert other.returncode == 0 and "on 9 images of" in other.stdout, str(other)
    assert judged.stdout.splitlines()[-1] == other.stdout.splitlines()[-1]
    told = call("predict", str(run), str(table), "--out", str(tmp_path / "classes.csv"))
    assert told.returncode == 0, str(told)
    rows = list(csv.DictReader((tmp_path / "classes.csv").read_text().splitlines()))
    assert len(rows) == 41 and rows[0]["path"] == str(tmp_path / "images" / "00.png")
    table.write_text(table.read_text().replace("40.png", "40.png").replace("light,test", "bright,test"))
    refused(call("evaluate", str(run), "--data-dir", str(table)), 3, "line 35, column species", "'bright' is unknown")


def test_auto_takes_a_table_and_the_same_from_folders_gives_the_same_model(tmp_path: Path) -> None:
    table = photos(tmp_path)
    lines = list(csv.DictReader(table.read_text().splitlines()))
    for line in lines:
        target = tmp_path / "folders" / line["part"] / line["species"] / Path(line["file"]).name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((tmp_path / line["file"]).read_bytes())
    # In the order of the folders.
    text = ["image,label,split"]
    for split in ("train", "test"):
        for line in (line for line in lines if line["part"] == split):
            text.append(f"folders/{split}/{line['species']}/{Path(line['file']).name},{line['species']},{split}")
    (tmp_path / "same.csv").write_text("\n".join(text))
    digests = []
    for data in ("folders", "same.csv"):
        flags = ["--model", "mlp-16x16", "--threads", "1", "--epochs", "1", "--cache", "auto"]
        made = call("auto", str(tmp_path / data), *flags, "--run-dir", str(tmp_path / f"run {data}"))
        assert made.returncode == 0, str(made)
        digests.append(json.loads((tmp_path / f"run {data}" / "summary.json").read_text())["parameter_digest"])
    assert digests[0] == digests[1]


def test_numbers_far_from_zero_are_predicted_as_those_near_it(tmp_path: Path) -> None:
    table = photos(tmp_path)
    lines = list(csv.DictReader(table.read_text().splitlines()))
    found = []
    for start in (0, 1_700_000_000):  # seconds since 1970, as many as float32 would round to multiples of 128
        seconds = [f"{line['file']},{start + 10 * row + 0.5},{line['part']}" for row, line in enumerate(lines)]
        (tmp_path / "times.csv").write_text("\n".join(["image,time,split", *seconds]))
        run, out = tmp_path / f"run {start}", tmp_path / f"{start}.csv"
        flags = ["--model", "mlp-16x16", "--threads", "1", "--epochs", "1", "--label-column", "time"]
        for words in (
            ("auto", str(tmp_path / "times.csv"), *flags, "--run-dir", str(run)),
            ("predict", str(run), str(table), "--out", str(out)),
        ):
            made = call(*words)
            assert made.returncode == 0, str(made)
        found.append([float(row["time"]) - start for row in csv.DictReader(out.read_text().splitlines())])
    assert np.std(found[0]) > 1
    np.testing.assert_allclose(found[0], found[1], atol=0.1)


def test_numbers_that_are_all_equal_are_refused(tmp_path: Path) -> None:
    rows = photos(tmp_path).read_text().replace("dark", "3.5").replace("light", "3.5").splitlines()
    (tmp_path / "same.csv").write_text("\n".join(["image,time,split", *rows[1:]]))
    flags = ["--model", "mlp-16x16", "--task", "numbers", "--run-dir", str(tmp_path / "run")]
    made = call("auto", str(tmp_path / "same.csv"), *flags)
    refused(made, 3, "the numbers of all 32 training samples are equal ([3.5])")


def test_a_table_that_cannot_be_used_is_refused_in_one_line(run_dir: Path, tmp_path: Path) -> None:
    table = photos(tmp_path)

    def train(*flags: str) -> Outcome:
        return call("train", *SMALL, "--data", str(table), "--run-dir", str(run_dir), *flags)

    refused(train(), 2, "no column named label", "--label-column")
    refused(train("--label-column", "kind"), 2, "--label-column (kind) is not a column of")
    refused(train(*COLUMNS, "--test-table", "test.txt"), 2, "--test-table (test.txt) must be a table")
    refused(train(*COLUMNS, "--test-table", "gone.csv"), 3, "gone.csv does not exist")
    table.write_text(table.read_text().replace("07.png,light", "07.png,"))
    refused(train(*COLUMNS), 3, "labels.csv, line 9, column species: no label")
    refused(call("train", *SMALL, "--label-column", "species"), 2, "--label-column needs --data")
    refused(call("auto", str(tmp_path / "gone.csv"), *SMALL[:2]), 3, "gone.csv does not exist")
    (tmp_path / "images" / "03.png").write_bytes(b"")
    refused(call("predict", str(run_dir), str(table)), 3)


KINDS = {
    "columns": ("red,light", "{red:d},{light:d}", ["--label-column", "red,light"]),
    "one cell": ("label", "{names}", ["--label-delimiter", "|"]),
    "numbers": ("label", "{number}", ["--task", "numbers"]),
}


@pytest.mark.parametrize(("how", "command"), [("columns", "train"), ("one cell", "auto"), ("numbers", "auto")])
def test_several_labels_and_numbers_are_trained_judged_predicted_and_exported(
    how: str, command: str, tmp_path: Path
) -> None:
    header, cells, flags = KINDS[how]
    lines = [f"image,{header},split"]
    for number in range(48):
        red, light = number % 2 == 1, number % 3 == 1
        pixels = np.random.default_rng(number).integers(0, 60, (16, 16, 3), dtype=np.uint8) + 120 * light
        pixels[..., 0] += 70 * red
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number:02d}.png")
        names = "|".join(["red"] * red + ["light"] * light)
        cell = cells.format(red=red, light=light, names=names, number=1000 + 50.5 * red + 7 * light)
        lines.append(f"{number:02d}.png,{cell},{'test' if number >= 36 else 'train'}")
    table, run = tmp_path / "labels.csv", tmp_path / "run"
    table.write_text("\n".join(lines))
    small = ["--model", "mlp-16x16", "--epochs", "1", "--threads", "1", *flags, "--run-dir", str(run)]
    data = [str(table)] if command == "auto" else ["--data", str(table), "--batch-size", "6"]
    made = call(command, *data, *small)
    assert made.returncode == 0, str(made)
    judged, other = call("evaluate", str(run)), call("evaluate", str(run), "--data-dir", str(table))
    assert judged.returncode == other.returncode == 0, f"{judged}\n{other}"
    told = call("predict", str(run), str(table), "--out", str(tmp_path / "answers.csv"))
    assert told.returncode == 0, str(told)
    rows = list(csv.DictReader((tmp_path / "answers.csv").read_text().splitlines()))
    assert [row["path"] for row in rows] == [str(tmp_path / f"{number:02d}.png") for number in range(48)]
    if how == "one cell":
        # Those of columns, once they are trained.
        return
    exported = call("export", str(run), "--format", "torch")
    assert exported.returncode == 0, str(exported)
    program = torch.export.load(run / "model.pt2").module()
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(row["path"]))).permute(2, 0, 1) for row in rows])
    found = program(pixels).detach()
    if how == "numbers":
        wanted = [float(row["label"]) for row in rows]
        np.testing.assert_allclose(found[:, 0].numpy(), wanted, rtol=1e-4)
        assert 900 < float(found.mean()) < 1200
    else:
        assert found.shape == (48, 2)
