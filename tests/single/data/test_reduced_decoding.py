"""Large JPEG files: decoded at a reduced scale where that loses nothing, and all others bit for bit as before."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvfreeze.data.data_sets import open_data
from hvfreeze.data.images import REDUCED, FileSource, count_odd, head_of, is_plain
from hvfreeze.data.reading import ORIENTATION, Reading, fitted, read_rgb
from hvfreeze.inference.card import Preparation
from tests.single.data import files

BEFORE = Reading(version=3)
SIDE, LARGE = 16, (800, 600)
FITS = ("crop", "squash", "pad")


@lru_cache
def scene(width: int, height: int) -> Image.Image:
    """Return a picture with gradients, edges and some noise, as a photograph has them."""
    x, y = np.meshgrid(np.linspace(0, 7, width), np.linspace(0, 5, height))
    waves = 128 + 60 * np.sin(x) * np.cos(y) + 50 * (np.hypot(x - 3, y - 2) < 1.5)
    noise = np.random.default_rng(0).normal(0, 4, (height, width, 3))
    return Image.fromarray(np.clip(waves[..., None] * [1.0, 0.8, 0.6] + noise, 0, 255).astype(np.uint8))


def save(path: Path, width: int, height: int, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    scene(width, height).save(path, quality=92, **more)
    return path


def source(*paths: Path, side: int = SIDE, **reading: Any) -> FileSource:
    return files.source(*paths, image_shape=(3, side, side), side=side, reading=Reading(**reading))


def apart(path: Path, **reading: str) -> np.ndarray:
    """Return by how much the pixels of an image differ from those of the image decoded at full scale."""
    now, whole = (source(path, **each).decode(0).astype(np.int16) for each in (reading, {**reading, "version": 3}))
    return np.abs(now - whole)


def sizes_decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which the size of each image is added as it comes from the decoder."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "hvfreeze.data.reading._in_rgb", lambda image, version: found.append(image.size) or image.convert("RGB")
    )
    return found


@pytest.mark.parametrize(
    ("size", "side", "decoded"),
    [
        (LARGE, 32, (100, 75)),
        (LARGE, 64, (200, 150)),
        (LARGE, 128, (400, 300)),
        (LARGE, 151, LARGE),
        ((800, 127), 32, (800, 127)),
        ((520, 390), 32, (130, 98)),
        ((512, 512), 32, (512, 512)),
    ],
)
def test_a_large_jpeg_is_decoded_to_at_least_twice_the_side_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], side: int, decoded: tuple[int, int]
) -> None:
    path = save(tmp_path / "1.jpg", *size)
    found = sizes_decoded(monkeypatch)
    source(path, side=side).decode(0)
    source(path, side=side, version=3).decode(0)
    assert found == [decoded, size]
    assert decoded == size or min(decoded) >= 2 * side


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_no_bit_changes_up_to_512_pixels_a_side_and_in_other_formats(tmp_path: Path, suffix: str) -> None:
    for size in [(512, 300), (40, 512), *([LARGE] if suffix != "jpg" else [])]:
        path = save(tmp_path / f"1.{suffix}", *size)
        for fit in FITS:
            now, before = source(path, fit=fit), source(path, fit=fit, version=3)
            np.testing.assert_array_equal(now.decode(0), before.decode(0))
            assert now.identity(local=False) == before.identity(local=False), "caches of these images stay"


@pytest.mark.parametrize("orientation", [1, 6])
def test_reduced_pixels_are_those_of_the_whole_image_but_for_rounding(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = save(tmp_path / "1.jpg", *LARGE, exif=exif)
    for fit in FITS:
        found = apart(path, fit=fit)
        assert 0 < found.mean() < 1.5 and found.max() < 24, (fit, found.mean(), found.max())


def test_grey_cmyk_progressive_and_multi_picture_files_are_reduced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, paths = scene(*LARGE), [tmp_path / f"{number}.jpg" for number in range(4)]
    picture.convert("L").save(paths[0])
    picture.convert("CMYK").save(paths[1])
    picture.save(paths[2], progressive=True)
    picture.save(paths[3], format="MPO", save_all=True, append_images=[picture.resize((160, 120))])
    assert count_odd(source(*paths))[REDUCED] == 4
    for path in paths:
        assert 0 < apart(path).mean() < 2, path
    found = sizes_decoded(monkeypatch)
    for row in range(4):
        source(*paths).decode(row)
    assert found == [(100, 75)] * 4


def test_data_says_so_where_an_image_is_reduced(tmp_path: Path) -> None:
    large, small = save(tmp_path / "1.jpg", *LARGE), save(tmp_path / "2.jpg", 512, 384)
    assert not is_plain(head_of(str(large))) and is_plain(head_of(str(small)))
    both = source(large, small)
    assert count_odd(both)[REDUCED] == 1 and count_odd(replace(both, side=None))[REDUCED] == 0
    now, third, second = (source(large, small, version=version).identity(local=False) for version in (4, 3, 2))
    assert now != third == second


def test_a_damaged_photograph_is_still_found(tmp_path: Path) -> None:
    path = save(tmp_path / "1.jpg", *LARGE)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(Exception, match="is not an intact image"):
        source(path).decode(0)


def test_a_model_reads_as_its_card_says_and_a_file_as_an_image_that_was_opened(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in "ab":
            save(tmp_path / split / name / "1.jpg", *LARGE)
    path = tmp_path / "test/b/1.jpg"
    trained = open_data("imagefolder", tmp_path, image_size=SIDE).test.decode(1)
    ours = Preparation(height=SIDE, width=SIDE, cropped_to=None, enlarged_to=None, mean=(0.5,) * 3, std=(1.0,) * 3)
    np.testing.assert_array_equal(ours.pixels_of(path), trained)
    with Image.open(path) as image:
        np.testing.assert_array_equal(ours.pixels(image), trained)
    expected = np.asarray(fitted(read_rgb(path, reading=BEFORE), SIDE, SIDE)).transpose(2, 0, 1)
    np.testing.assert_array_equal(replace(ours, reading=3).pixels_of(path), expected)
    assert (expected != trained).any()
