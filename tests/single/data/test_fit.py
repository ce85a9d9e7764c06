"""Images that are not square: cropped, and the run says how much that loses, squashed or padded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import hvfreeze
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.reading import Reading, fitted
from hvfreeze.data.sizes import ImageSizes
from tests.program import call

RUN = "--model mlp-16x16 --data imagefolder --image-size 32 --batch-size 8 --epochs 1 --threads 1"


def banner(colour: int) -> Image.Image:
    """256 x 64: green at the left end, grey, and the class at the right end."""
    pixels = np.full((64, 256, 3), 128, np.uint8)
    pixels[:, :64], pixels[:, 192:] = (0, 255, 0), (colour, 0, 255 - colour)
    return Image.fromarray(pixels)


def save_banners(folder: Path) -> Path:
    for part, count in (("train", 12), ("test", 4)):
        for name, colour in (("a", 0), ("b", 255)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                banner(colour).save(folder / part / name / f"{number}.png")
    return folder


def pixels(fit: str, side: int = 32, **more: object) -> np.ndarray:
    image = fitted(banner(255), side, side, reading=Reading(fit=fit, **more))  # type: ignore[arg-type]
    assert image.size == (side, side)
    return np.asarray(image)


def test_a_crop_loses_the_ends_a_squash_and_a_pad_keep_them() -> None:
    assert (np.abs(pixels("crop").astype(int) - 128) <= 1).all()
    squashed = pixels("squash")
    assert squashed[16, 0].tolist() == [0, 255, 0] and squashed[16, 31].tolist() == [255, 0, 0]
    assert squashed[0, 31].tolist() == squashed[31, 31].tolist() == [255, 0, 0]
    padded = pixels("pad", background=(1, 2, 3))
    assert padded[16, 0].tolist() == [0, 255, 0] and padded[16, 31].tolist() == [255, 0, 0]
    assert (padded[:12] == (1, 2, 3)).all() and (padded[20:] == (1, 2, 3)).all()
    assert not (padded[12:20] == (1, 2, 3)).all(2).any()


@pytest.mark.parametrize("size", [(64, 1), (1, 64), (33, 32), (5, 7)])
@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_any_proportions_fit_any_size(fit: str, size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "red")
    for height, width in ((1, 1), (16, 16), (8, 24)):
        assert fitted(image, height, width, reading=Reading(fit=fit)).size == (width, height)
    assert fitted(image, image.height, image.width, reading=Reading(fit=fit)) is image


def test_squares_keep_as_many_pixels_as_the_images_have_of_what_they_show(tmp_path: Path) -> None:
    save_banners(tmp_path)
    shapes = {
        fit: open_data("imagefolder", tmp_path, image_size=128, reading=Reading(fit=fit)).train.image_shape
        for fit in ("crop", "squash", "pad")
    }
    assert shapes == {"crop": (3, 64, 64), "squash": (3, 128, 128), "pad": (3, 128, 128)}


def test_how_much_is_cut_off_is_told_for_images_that_lose_something() -> None:
    sizes = ImageSizes(Counter({(64, 256): 3, (64, 128): 1, (64, 64): 4}))
    [note] = sizes.one_shape(32, fit="crop")[2]
    assert "of 8 images probed, 4 lose 69% of their area; use --fit squash or --fit pad" in note
    assert ImageSizes(Counter({(1000, 1001): 5})).one_shape(32, fit="crop")[2] == []
    assert sizes.one_shape(32, fit="pad")[2] == []


def test_a_fit_is_part_of_the_identity_of_rows_and_a_crop_is_what_it_was(tmp_path: Path) -> None:
    save_banners(tmp_path)
    readings = (Reading(fit="squash"), Reading(fit="pad"), Reading(fit="pad", background=(0, 0, 0)), Reading())
    known = [open_data("imagefolder", tmp_path, image_size=32, reading=each).train.identity() for each in readings]
    assert len(set(known)) == 4
    before = Reading(version=2)
    assert known[3] == open_data("imagefolder", tmp_path, image_size=32, reading=before).train.identity()


def test_a_model_answers_for_images_made_to_fit_as_those_that_it_has_learned_from(tmp_path: Path) -> None:
    folder, run = save_banners(tmp_path / "data"), tmp_path / "run"
    flags = [*RUN.split(), "--data-dir", str(folder), "--fit", "pad", "--background", "black"]
    outcome = call("train", *flags, "--run-dir", str(run))
    assert outcome.returncode == 0 and "of their area" not in outcome.stdout, str(outcome)
    card = yaml.safe_load((run / "model.yaml").read_text())["image"]
    assert (card["fit"], card["background"]) == ("pad", [0, 0, 0])
    read = open_data("imagefolder", folder, image_size=32, reading=Reading(fit="pad", background=(0, 0, 0))).test
    prepare = hvfreeze.load_model(run).preparation
    for row in (0, 7):
        np.testing.assert_array_equal(prepare.pixels_of(Path(read.called(row))), read.decode(row))
    losses = []
    for more in ([], ["--data-dir", str(folder)]):
        assert call("evaluate", str(run), *more, "--out", str(tmp_path / "out")).returncode == 0
        losses.append(json.loads((tmp_path / "out" / "evaluation.json").read_text())["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fit pad", "--fit needs --image-size"),
        ("--fit stretch --image-size 32", "--fit (stretch) must be one of crop, squash, pad"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(flags: str, message: str) -> None:
    outcome = call("train", *flags.split())
    assert outcome.returncode == 2 and message in outcome.stderr
