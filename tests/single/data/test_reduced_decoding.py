from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hvfreeze.data.data_sets import open_data
from hvfreeze.data.images import REDUCED, FileSource, count_odd, head_of, is_plain
from hvfreeze.data.reading import ORIENTATION, Reading, fitted, read_rgb
from hvfreeze.inference.card import Preparation

BEFORE = Reading(version=3)
SIDE = 32


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


def source(*paths: Path, reading: Reading = Reading(), side: int | None = SIDE) -> FileSource:  # noqa: B008  (frozen)
    names = tuple(path.name for path in paths)
    return FileSource(root=paths[0].parent, paths=names, image_shape=(3, SIDE, SIDE), side=side, reading=reading)


def whole(path: Path, **reading: str) -> NDArray[np.uint8]:
    """Return an image's (3, SIDE, SIDE) pixels, decoded at full scale."""
    return source(path, reading=Reading(version=3, **reading)).decode(0)  # type: ignore[arg-type]


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
        ((1600, 1200), 32, (200, 150)),
        ((1600, 1200), 128, (400, 300)),
        ((1600, 1200), 224, (800, 600)),
        ((1600, 1200), 301, (1600, 1200)),
        ((1600, 127), 32, (1600, 127)),
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
    source(path, side=side, reading=BEFORE).decode(0)
    assert found == [decoded, size]
    assert decoded == size or min(decoded) >= 2 * side


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_no_bit_changes_up_to_512_pixels_a_side_and_in_other_formats(tmp_path: Path, suffix: str, fit: str) -> None:
    for size in [(512, 512), (512, 300), (40, 512), (1100, 800)]:
        if suffix == "jpg" and max(size) > 512:
            continue
        path = save(tmp_path / f"1.{suffix}", *size)
        now, before = source(path, reading=Reading(fit=fit)), source(path, reading=Reading(version=3, fit=fit))
        np.testing.assert_array_equal(now.decode(0), before.decode(0))
        assert now.identity(local=False) == before.identity(local=False), "caches of these images stay"


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_reduced_pixels_are_those_of_the_whole_image_but_for_rounding(
    tmp_path: Path, fit: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = save(tmp_path / "1.jpg", 1600, 1200, exif=exif)
    now = source(path, reading=Reading(fit=fit)).decode(0).astype(np.int16)
    apart = np.abs(now - whole(path, fit=fit))
    assert 0 < apart.mean() < 1.5 and apart.max() < 24, (apart.mean(), apart.max())


def test_grey_cmyk_progressive_and_multi_picture_files_are_reduced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, paths = scene(1600, 1200), [tmp_path / f"{number}.jpg" for number in range(4)]
    picture.convert("L").save(paths[0])
    picture.convert("CMYK").save(paths[1])
    picture.save(paths[2], progressive=True)
    picture.save(paths[3], format="MPO", save_all=True, append_images=[picture.resize((160, 120))])
    assert count_odd(source(*paths))[REDUCED] == 4
    for path in paths:
        apart = np.abs(source(path).decode(0).astype(np.int16) - whole(path))
        assert 0 < apart.mean() < 2, (path, apart.mean())
    found = sizes_decoded(monkeypatch)
    for row in range(4):
        source(*paths).decode(row)
    assert found == [(200, 150)] * 4


def test_data_says_so_where_an_image_is_reduced(tmp_path: Path) -> None:
    large, small = save(tmp_path / "1.jpg", 1600, 1200), save(tmp_path / "2.jpg", 512, 384)
    assert not is_plain(head_of(str(large))) and is_plain(head_of(str(small)))
    both = source(large, small)
    assert count_odd(both)[REDUCED] == 1 and count_odd(replace(both, side=None))[REDUCED] == 0
    assert both.identity(local=False) != replace(both, reading=BEFORE).identity(local=False)
    assert replace(both, reading=BEFORE).identity(local=False) == replace(both, reading=Reading(version=2)).identity(
        local=False
    )


def test_a_damaged_photograph_is_still_found(tmp_path: Path) -> None:
    path = save(tmp_path / "1.jpg", 1600, 1200)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(Exception, match="is not an intact image"):
        source(path).decode(0)


def test_a_model_reads_as_its_card_says_and_a_file_as_an_image_that_was_opened(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in "ab":
            save(tmp_path / split / name / "1.jpg", 1600, 1200)
    path = tmp_path / "test/b/1.jpg"
    trained = open_data("imagefolder", tmp_path, image_size=SIDE).test.decode(1)
    shape: dict[str, int] = {"height": SIDE, "width": SIDE}
    ours = Preparation(**shape, cropped_to=None, enlarged_to=None, mean=(0.5,) * 3, std=(1.0,) * 3)
    np.testing.assert_array_equal(ours.pixels_of(path), trained)
    with Image.open(path) as image:
        np.testing.assert_array_equal(ours.pixels(image), trained)
    earlier = replace(ours, reading=3)
    expected = np.asarray(fitted(read_rgb(path, reading=BEFORE), SIDE, SIDE)).transpose(2, 0, 1)
    np.testing.assert_array_equal(earlier.pixels_of(path), expected)
    assert (expected != trained).any()
