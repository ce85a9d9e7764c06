"""An image above the size limit is reported with the limit, and is not skipped as a broken one."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from hvfreeze.data.reading import LIMIT, TooLargeError, open_image, read_rgb
from hvfreeze.errors import UsageError
from tests.program import Outcome, call, save_photos
from tests.single.data.files import png
from tests.single.refusing import refused


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The limit is as it was after each test."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)
    yield


def noticed(image: Path) -> Path:
    Image.new("RGB", (100, 80), "red").save(image)
    return image


def train(folder: Path, *flags: str) -> Outcome:
    words = "--model mlp-16x16 --data imagefolder --image-size 32 --batch-size 8 --epochs 1 --threads 1"
    return call("train", *words.split(), "--data-dir", str(folder), "--run-dir", str(folder.parent / "run"), *flags)


def test_the_limit_is_told_and_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1024 * 1024 * 1024 // 4 // 3)
    path = tmp_path / "1.png"
    path.write_bytes(png(14000, 14000))
    with pytest.raises(
        TooLargeError, match=r"1\.png is too large: 197 megapixels, and the limit is 178; .*=197 on all"
    ):
        read_rgb(path)
    monkeypatch.setenv(LIMIT, "197")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_image(path) as image:
            assert image.size == (14000, 14000)
    for text in ("0", "much", "-3", "1.5"):
        monkeypatch.setenv(LIMIT, text)
        with pytest.raises(UsageError, match=rf"{LIMIT} \({text}\) must be a whole number of megapixels"):
            open_image(path)


@pytest.mark.parametrize("flags", [[], ["--skip-bad"]])
def test_a_run_stops_at_it_whatever_is_done_with_broken_images(tmp_path: Path, flags: list[str]) -> None:
    folder = save_photos(tmp_path / "photos")
    noticed(folder / "train" / "a" / "00.png")
    (folder / "train" / "a" / "01.png").write_bytes(b"broken")
    Image.new("RGB", (200, 200)).save(folder / "train" / "b" / "00.png")
    refused(train(folder, *flags), 3, "train/b/00.png is too large", "shrink it, or set")


def test_pillow_itself_says_nothing(tmp_path: Path) -> None:
    folder = save_photos(tmp_path / "photos")
    noticed(folder / "train" / "a" / "00.png")
    outcome = train(folder)
    assert outcome.returncode == 0 and "decompression" not in outcome.stdout + outcome.stderr, str(outcome)
    run = str(tmp_path / "run")
    large = tmp_path / "large.png"
    Image.new("RGB", (200, 200)).save(large)
    for skipped in ([], ["--skip-bad"]):
        answered = call("predict", run, str(noticed(tmp_path / "some.png")), str(large), *skipped)
        assert answered.returncode == (0 if skipped else 3) and "large.png is too large" in answered.stderr
        assert "some.png,a" in answered.stdout or "some.png,b" in answered.stdout


def test_text_of_a_png_that_is_too_long_is_called_so(tmp_path: Path) -> None:
    text = b"Comment\0\0" + zlib.compress(b"x" * 2**21)
    (tmp_path / "1.png").write_bytes(png(2, 2, chunks=[(b"zTXt", text)]))
    with pytest.raises(TooLargeError, match=r"holds more text than Pillow accepts .*; save it without metadata"):
        read_rgb(tmp_path / "1.png")
