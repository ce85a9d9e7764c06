"""Transparent parts of images show the background, in every format and mode; opaque images stay as they are."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import hvfreeze
from hvfreeze.data.images import FRAMES, TRANSPARENT, count_odd, head_of, is_plain
from hvfreeze.data.reading import READING, Reading, read_rgb, to_rgb
from tests.program import call, save_photos
from tests.single.data.files import png, source

OLD = Reading(version=2)
DRAWING = Image.fromarray(
    np.array([[[0, 0, 0, 0], [0, 200, 0, 255]], [[0, 0, 250, 128], [9, 9, 9, 255]]], np.uint8).repeat(4, 0).repeat(4, 1)
)
WHERE = np.array([[True, False], [True, False]]).repeat(4, 0).repeat(4, 1)
"""Where it is not opaque."""


def keyed(depth: int, kind: int, row: bytes, transparent: bytes) -> bytes:
    """A PNG file of two pixels, of which the first has the value that is transparent."""
    return png(2, 1, depth=depth, kind=kind, pixels=b"\0" + row, chunks=[(b"tRNS", transparent)])


def encoded(image: Image.Image, kind: str, **more: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


FILES = {
    "1.png": encoded(DRAWING, "PNG"),
    "grey.png": encoded(DRAWING.convert("LA"), "PNG"),
    "palette.png": encoded(DRAWING.quantize(8), "PNG"),
    "1.tif": encoded(DRAWING, "TIFF"),
    "grey.tif": encoded(DRAWING.convert("LA"), "TIFF"),
    "1.webp": encoded(DRAWING, "WEBP", lossless=True),
    "lossy.webp": encoded(DRAWING, "WEBP", quality=100),
    "1.gif": encoded(DRAWING, "GIF"),
}
COLOUR = struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC)
KEYED = {
    "bit": keyed(1, 0, bytes([0b01000000]), b"\0\0"),
    "two bits": keyed(2, 0, bytes([0b11000000]), b"\0\3"),
    "four bits": keyed(4, 0, bytes([0xF0]), b"\0\x0f"),
    "grey": keyed(8, 0, bytes([7, 0]), b"\0\7"),
    "16-bit grey": keyed(16, 0, struct.pack(">HH", 300, 0), struct.pack(">H", 300)),
    "colour": keyed(8, 2, bytes([1, 2, 3, 0, 0, 0]), b"\0\1\0\2\0\3"),
    "16-bit colour": keyed(16, 2, COLOUR + bytes(6), COLOUR),
}


@pytest.mark.parametrize("name", FILES)
def test_transparent_parts_show_the_background_and_opaque_ones_are_as_before(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    before = np.asarray(read_rgb(path, reading=OLD))
    for colour in ((255, 255, 255), (0, 0, 0), (10, 20, 30)):
        pixels = np.asarray(read_rgb(path, reading=Reading(background=colour)))
        assert (pixels[:4, :4] == colour).all()
        np.testing.assert_array_equal(pixels[~WHERE], before[~WHERE])
    assert count_odd(source(path))[TRANSPARENT] == 1 and not is_plain(head_of(str(path)))


@pytest.mark.parametrize("name", KEYED)
def test_a_value_that_stands_for_transparent_is_known_at_every_depth(tmp_path: Path, name: str) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(KEYED[name])
    first, second = np.asarray(read_rgb(path, reading=Reading(background=(9, 8, 7))))[0].tolist()
    assert first == [9, 8, 7] and second in ([0, 0, 0], [255, 255, 255])
    assert count_odd(source(path))[TRANSPARENT] == 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_an_alpha_channel_that_hides_nothing_changes_nothing(tmp_path: Path, kind: str, mode: str) -> None:
    opaque = DRAWING.copy()
    opaque.putalpha(255)
    path = tmp_path / f"1.{kind.lower()}"
    path.write_bytes(encoded(opaque.convert(mode), kind))
    np.testing.assert_array_equal(np.asarray(read_rgb(path)), np.asarray(read_rgb(path, reading=OLD)))
    assert count_odd(source(path))[TRANSPARENT] == 0
    assert source(path).identity(local=False) == source(path, reading=OLD).identity(local=False)


@pytest.mark.parametrize("mode", ["RGBa", "La"])
def test_premultiplied_pictures_of_a_data_set_are_read_too(mode: str) -> None:
    picture = DRAWING.convert("RGBa") if mode == "RGBa" else DRAWING.convert("LA").convert("La")
    assert (np.asarray(to_rgb(picture))[:4, :4] == 255).all()


def test_another_background_gives_rows_of_a_cache_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(FILES["1.png"])
    readings = (OLD, Reading(), Reading(background=(0, 0, 0)))
    assert len({source(path, reading=each).identity(local=False) for each in readings}) == 3


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_files_of_several_frames_or_pages_are_counted(tmp_path: Path, kind: str) -> None:
    picture = DRAWING.convert("RGB")
    path = tmp_path / f"1.{kind.lower()}"
    picture.save(path, kind, save_all=True, append_images=[picture.rotate(90)])
    assert count_odd(source(path))[FRAMES] == 1
    picture.save(path, kind)
    assert count_odd(source(path))[FRAMES] == 0
    # A photograph with a preview in its file.
    picture.save(path, "MPO", save_all=True, append_images=[picture])
    assert count_odd(source(path))[FRAMES] == 0


def test_a_run_says_how_many_images_are_transparent_and_its_card_what_is_behind_them(tmp_path: Path) -> None:
    folder, run = save_photos(tmp_path / "photos", training=12), tmp_path / "run"
    for path in folder.glob("*/a/*.png"):
        DRAWING.resize((32, 32), Image.Resampling.NEAREST).convert("LA").save(path)
    flags = "--model mlp-16x16 --data imagefolder --batch-size 8 --epochs 1 --threads 1 --background 200,190,180"
    outcome = call("train", *flags.split(), "--data-dir", str(folder), "--run-dir", str(run))
    assert outcome.returncode == 0, str(outcome)
    assert f"12 of 24 train {TRANSPARENT}" in outcome.stdout and "no effect" not in outcome.stdout
    tree = yaml.safe_load((run / "model.yaml").read_text())
    assert tree["image"]["reading"] == READING and tree["image"]["background"] == [200, 190, 180]
    assert "as the run reported" in call("evaluate", str(run)).stdout
    path = folder / "test" / "a" / "00.png"
    assert (hvfreeze.load_model(run).preparation.pixels_of(path)[:, 0, 0] == (200, 190, 180)).all()
    # A model of an earlier version still reads the colours of transparent pixels from the file.
    del tree["image"]["background"], tree["image"]["fit"]
    tree["image"]["reading"] = 2
    (run / "model.yaml").write_text(yaml.safe_dump(tree))
    assert (hvfreeze.load_model(run).preparation.pixels_of(path)[:, 0, 0] == 0).all()


@pytest.mark.parametrize("value", ["pink", "1,2", "1,2,256", "1,2,0.5", "0,-1,0", ""])
def test_a_background_that_is_no_colour_is_refused(value: str) -> None:
    outcome = call("train", "--background", value)
    assert outcome.returncode == 2 and "--background (" in outcome.stderr and "as in 128,128,128" in outcome.stderr


def test_a_background_without_effect_is_told(tmp_path: Path) -> None:
    flags = "--model mlp-16x16 --train-samples 60 --batch-size 8 --epochs 1 --threads 1 --background black"
    outcome = call("train", *flags.split(), "--image-size", "32", "--fit", "pad", "--run-dir", str(tmp_path / "run"))
    assert "--background (black) has no effect: no image is transparent or padded" in outcome.stdout
    assert "--fit (pad) has no effect: all images are square" in outcome.stdout
