"""Image files and arrays: decoded to RGB of one shape, identified by what they hold, refused by name when damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvfreeze.data.images import ArraySource
from hvfreeze.data.reading import Reading
from hvfreeze.errors import RefusedError, UsageError
from tests.single.data.files import source


def write_image(path: Path, *, width: int = 8, height: int = 8, mode: str = "RGB", seed: int = 0) -> Image.Image:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(pixels).convert("RGB" if mode == "RGBA" else mode)
    if mode == "RGBA":
        image.putalpha(128)
    image.save(path, lossless=True) if path.suffix == ".webp" else image.save(path)
    return image


@pytest.mark.parametrize(
    ("suffix", "modes"),
    [
        (".png", ["RGB", "L", "RGBA", "P", "1"]),
        (".webp", ["RGB", "L", "RGBA"]),
        (".bmp", ["RGB", "L", "P"]),
        (".tif", ["RGB", "L", "RGBA", "CMYK"]),
        (".gif", ["L", "P"]),
    ],
)
def test_every_mode_becomes_the_rgb_that_pillow_shows(tmp_path: Path, suffix: str, modes: list[str]) -> None:
    for mode in modes:
        write_image(tmp_path / f"1{suffix}", mode=mode)
        pixels = source(tmp_path / f"1{suffix}").decode(0)
        assert (pixels.shape, pixels.dtype, pixels.flags.c_contiguous) == ((3, 8, 8), np.uint8, True)
        assert np.abs(pixels.astype(int) - on_white(tmp_path / f"1{suffix}")).max() <= 1


def on_white(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        white = Image.new("RGBA", image.size, "white")
        shown = Image.alpha_composite(white, image.convert("RGBA")) if image.mode in ("RGBA", "P") else image
        return np.asarray(shown.convert("RGB")).transpose(2, 0, 1).astype(int)


def test_palettes_with_transparency_decode_without_a_warning(tmp_path: Path) -> None:
    image = write_image(tmp_path / "1.png", mode="P")
    image.save(tmp_path / "1.png", transparency=bytes(range(256)))
    plain = source(tmp_path / "1.png", reading=Reading(version=2))
    np.testing.assert_array_equal(plain.decode(0), np.asarray(image.convert("RGB")).transpose(2, 0, 1))
    assert np.abs(source(tmp_path / "1.png").decode(0).astype(int) - on_white(tmp_path / "1.png")).max() <= 1


def test_a_side_takes_the_centre_square_and_scales_it(tmp_path: Path) -> None:
    wide = write_image(tmp_path / "wide.png", width=21, height=8)
    square = np.asarray(wide)[:, 6:14].transpose(2, 0, 1)
    np.testing.assert_array_equal(source(tmp_path / "wide.png", side=8).decode(0), square)
    halved = source(tmp_path / "wide.png", image_shape=(3, 4, 4), side=4).decode(0)
    # Antialiased: every source pixel counts, so the mean survives where picking pixels would not keep it.
    assert halved.shape == (3, 4, 4)
    assert abs(float(halved.mean()) - float(square.mean())) < 4
    assert float(halved.std()) < 0.75 * float(square.std())


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: data[: len(data) // 2], "is not an intact image"),
        (lambda data: b"", "is not an intact image"),
        (lambda data: data[:60] + bytes(40) + data[100:], "is not an intact image"),
        (None, "cannot be read (No such file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: object, word: str) -> None:
    path = tmp_path / "1.png"
    write_image(path, width=64, height=64)
    if callable(damage):
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(RefusedError) as refusal:
        source(tmp_path / "1.png", image_shape=(3, 64, 64)).decode(0)
    assert str(path) in str(refusal.value)
    assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "pixels", "mode"),
    [("1.tif", np.float32, "F"), ("1.tif", np.int32, "I")],
    ids=["float TIFF", "32-bit TIFF"],
)
def test_pixels_without_a_known_range_are_refused(tmp_path: Path, name: str, pixels: type, mode: str) -> None:
    Image.fromarray(np.full((8, 8), 300, dtype=pixels)).save(tmp_path / name)
    told = rf"{name} cannot be used: pixels of mode {mode} have no known range; convert it to 8 bits$"
    with pytest.raises(RefusedError, match=told):
        source(tmp_path / name).decode(0)


def test_another_size_without_a_side_is_a_usage_error_that_names_the_file(tmp_path: Path) -> None:
    write_image(tmp_path / "odd.png", width=9, height=7)
    with pytest.raises(UsageError, match=r"odd.png has 9x7 pixels, others have 8x8; use --image-size"):
        source(tmp_path / "odd.png").decode(0)


def test_a_file_sources_identity_follows_paths_sizes_of_files_and_of_images(tmp_path: Path) -> None:
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for seed, path in enumerate(paths):
        write_image(path, seed=seed)
    first = source(*paths)
    others = [
        source(*paths[::-1]),
        source(*paths, image_shape=(3, 4, 4), side=4),
        replace(first, num_bytes=np.array([10, 20])),
        replace(first, num_bytes=np.array([20, 10])),
    ]
    assert len({each.identity(local=False) for each in (first, *others)}) == 5
    later = replace(first, local="later")
    assert later.identity(local=False) == first.identity(local=False)
    assert later.identity(local=True) != first.identity(local=True)


def test_arrays_decode_to_themselves_or_their_resized_centre_and_identify_by_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    kept, halved = ArraySource(pixels=pixels, side=None), ArraySource(pixels=pixels, side=4)
    np.testing.assert_array_equal(kept.decode(2), pixels[2])
    np.testing.assert_array_equal(ArraySource(pixels=pixels, side=8).decode(2), pixels[2])
    Image.fromarray(pixels[1].transpose(1, 2, 0)).save(tmp_path / "1.png")
    np.testing.assert_array_equal(halved.decode(1), source(tmp_path / "1.png", image_shape=(3, 4, 4), side=4).decode(0))
    changed = pixels.copy()
    changed[2, 2, 7, 7] ^= 1
    identities = {s.identity(local=True) for s in (kept, halved, ArraySource(pixels=changed, side=None))}
    assert len(identities) == 3
    assert kept.identity(local=True) == ArraySource(pixels=pixels.copy(), side=None).identity(local=False)
