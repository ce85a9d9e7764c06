"""How image files become pixels: upright as their EXIF orientation says, dark 16-bit grey scaled, and told."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import pytest
import yaml
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

import hvfreeze
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.images import (
    COARSE,
    HEAD_BYTES,
    SCALED,
    TURNED,
    count_odd,
    digest_of_files,
    head_of,
    is_plain,
)
from hvfreeze.data.reading import ORIENTATION, READING, Reading, read_rgb
from tests.program import call, save_photos
from tests.single.data.files import png, source

FRUIT = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)


def save(path: Path, orientation: int | None, **more: object) -> Path:
    """Write a picture that lies as the orientation says."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(FRUIT).save(path, **({"exif": exif} if orientation else {}), **more)
    return path


def save_grey(path: Path, most: int) -> np.ndarray:
    values = np.linspace(0, most, 48).astype(np.uint16).reshape(6, 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return values


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", [1, 4, 6, 7])
def test_a_picture_is_turned_as_its_exif_orientation_says(tmp_path: Path, suffix: str, orientation: int) -> None:
    path = save(tmp_path / f"1.{suffix}", orientation)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(read_rgb(path)), expected)
    # Pillow turns TIFF itself, so that it is read as it always was.
    turned = orientation > 1 and suffix != "tif"
    assert (np.asarray(read_rgb(path, reading=Reading(version=1))).shape != expected.shape) == (
        turned and orientation > 4
    )
    assert count_odd(source(path))[TURNED] == turned


@pytest.mark.parametrize("name", ["1.jpg", "1.webp", "2.jpg", "1.png", "lossless.webp", "progressive.jpg"])
def test_the_first_bytes_of_a_file_rule_out_what_is_special_only_where_pillow_finds_nothing(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    Image.fromarray(FRUIT).save(path, lossless=name.startswith("lossless"), progressive=name.startswith("progressive"))
    assert is_plain(head_of(str(path)))
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/' tiff:Orientation='6'/>"
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode())
    described = {"pnginfo": text} if path.suffix == ".png" else {"xmp": xmp}
    for more in ({"exif": b"Exif\0\0" + Image.Exif().tobytes()}, described):
        Image.fromarray(FRUIT).save(path, **more)
        assert not is_plain(head_of(str(path)))
    for damaged in (b"", b"RIFF", b"\xff\xd8", b"\xff\xd8\xff\xe0\0", path.read_bytes()[:20]):
        assert not is_plain(damaged)


def test_what_may_come_behind_the_first_bytes_of_a_png_is_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "1.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    assert path.stat().st_size > HEAD_BYTES and not is_plain(head_of(str(path)))
    save_grey(path, 4095)
    assert path.stat().st_size < HEAD_BYTES and not is_plain(head_of(str(path)))


def test_an_orientation_behind_the_pixels_of_a_png_counts(tmp_path: Path) -> None:
    path = save(tmp_path / "1.png", 6)
    content = path.read_bytes()
    start = content.index(b"eXIf") - 4
    length = int.from_bytes(content[start : start + 4], "big") + 12
    chunk, rest = content[start : start + length], content[:start] + content[start + length :]
    end = rest.index(b"IEND") - 4
    path.write_bytes(rest[:end] + chunk + rest[end:])
    assert read_rgb(path).size == (24, 36) and count_odd(source(path))[TURNED] == 1


def test_damaged_exif_data_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "1.png"
    Image.fromarray(FRUIT).save(path, exif=b"Exif\0\0MM\0*\0\0\0\xff\xff")
    assert read_rgb(path).size == (36, 24) and count_odd(source(path))[TURNED] == 0
    assert read_rgb(save(tmp_path / "2.jpg", 99)).size == (36, 24)


@pytest.mark.parametrize(("most", "unused"), [(65535, 8), (2049, 4), (1000, 2), (255, 0)])
@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_grey_of_16_bits_is_scaled_by_the_bits_that_the_image_uses(
    tmp_path: Path, suffix: str, most: int, unused: int
) -> None:
    values = save_grey(tmp_path / f"1.{suffix}", most)
    for channel in np.asarray(read_rgb(tmp_path / f"1.{suffix}")).transpose(2, 0, 1):
        np.testing.assert_array_equal(channel, values >> unused)
    np.testing.assert_array_equal(
        np.asarray(read_rgb(tmp_path / f"1.{suffix}", reading=Reading(version=1)))[..., 0], values >> 8
    )
    assert count_odd(source(tmp_path / f"1.{suffix}"))[SCALED] == (unused != 8)


def test_a_pgm_file_is_scaled_by_its_own_maximum(tmp_path: Path) -> None:
    values = np.linspace(0, 4095, 48).astype(np.uint16).reshape(6, 8)
    (tmp_path / "1.pgm").write_bytes(b"P5 8 6 4095\n" + values.astype(">u2").tobytes())
    np.testing.assert_array_equal(np.asarray(read_rgb(tmp_path / "1.pgm"))[..., 0], values >> 4)
    assert count_odd(source(tmp_path / "1.pgm"))[SCALED] == 0


def test_colour_of_16_bits_is_counted_for_pillow_gives_the_upper_8(tmp_path: Path) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(png(1, 1, depth=16, pixels=bytes(7)))
    assert count_odd(source(path))[COARSE] == 1 and count_odd(source(save(tmp_path / "2.png", None)))[COARSE] == 0


def test_rows_of_files_that_are_read_as_before_keep_their_identity(tmp_path: Path) -> None:
    paths = [save(tmp_path / "1.jpg", None), save(tmp_path / "2.tif", 6), save(tmp_path / "3.jpg", 1)]
    save_grey(tmp_path / "4.png", 65535)
    plain = source(*paths, tmp_path / "4.png")
    header = f"{plain.image_shape} {plain.side} {PIL.__version__} "
    before = hashlib.sha256(f"{header} {digest_of_files(plain.paths, plain.num_bytes)}".encode()).hexdigest()
    assert plain.identity(local=False) == before
    for orientation, most in ((6, 65535), (1, 4095)):
        save(paths[2], orientation)
        save_grey(tmp_path / "4.png", most)
        assert (
            replace(plain).identity(local=False)
            != before
            == replace(plain, reading=Reading(version=1)).identity(local=False)
        )


def test_shares_of_a_count_are_the_whole(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{number}.jpg", 6 if number % 3 == 0 else None) for number in range(10)]
    paths.append(tmp_path / "broken.jpg")
    paths[-1].write_bytes(b"no image")
    whole = count_odd(source(*paths), workers=2)
    assert whole[TURNED] == 4
    parts = [count_odd(source(*paths), share=share, shares=3) for share in range(3)]
    assert {what: sum(part[what] for part in parts) for what in whole} == whole


def test_the_size_of_a_turned_picture_is_that_of_the_upright_one(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg"):
            path = save(tmp_path / part / name, None)
    with Image.open(path) as image:
        upright = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    upright.save(tmp_path / "train/a/2.jpg", exif=exif)
    train = open_data("imagefolder", tmp_path).train
    assert train.image_shape == (3, 24, 36) == train.decode(1).shape


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs of which some are turned, in training and test, and some are dark grey of 16 bits."""
    folder = save_photos(tmp_path / "photos")
    for name in ("train/a/03.png", "train/b/05.png", "test/a/01.png"):
        save(folder / name, 6)
    save_grey(folder / "test/b/00.png", 4095)
    return folder


def test_a_run_says_what_it_turns_and_its_card_how_files_are_read(photos: Path, tmp_path: Path) -> None:
    flags = f"--model mlp-16x16 --data imagefolder --data-dir {photos} --image-size 32 --batch-size 8 --epochs 1"
    outcome = call("train", *flags.split(), "--threads", "1", "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 0, str(outcome)
    assert f"2 of 48 train {TURNED}" in outcome.stdout and f"1 of 8 test {TURNED}" in outcome.stdout
    assert f"1 of 8 test {SCALED}" in outcome.stdout
    card = tmp_path / "run/model.yaml"
    tree = yaml.safe_load(card.read_text())
    assert tree["image"].pop("reading") == READING

    def pixels() -> list[bytes]:
        prepare = hvfreeze.load_model(tmp_path / "run").transform
        paths = (photos / "test/a/01.png", photos / "test/b/00.png", photos / "test/a/02.png")
        for path in paths:
            with Image.open(path) as image:
                assert (prepare.pixels(image) == prepare.pixels_of(path)).all()
        return [prepare.pixels_of(path).tobytes() for path in paths]

    now = pixels()
    # A card of an earlier version: its model still reads files in the earlier way.
    card.write_text(json.dumps(tree))
    before = pixels()
    assert before[0] != now[0] and before[1] != now[1] and before[2] == now[2]
    own = tmp_path / "out"
    assert call("evaluate", str(tmp_path / "run"), "--out", str(own)).returncode == 0
    given = tmp_path / "given"
    assert call("evaluate", str(tmp_path / "run"), "--data-dir", str(photos), "--out", str(given)).returncode == 0
    losses = [json.loads((out / "evaluation.json").read_text())["loss"] for out in (own, given)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
