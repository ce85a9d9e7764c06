"""DICOM files and images of more than three channels: refused by name, with what to do."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hvfreeze.data.folders import list_folders
from hvfreeze.data.reading import picture_of
from hvfreeze.errors import RefusedError
from tests.program import call, save_photos
from tests.single.data.files import source
from tests.single.refusing import refused


def tiff(path: Path, channels: int, *, extra: tuple[int, ...], photometric: int = 2) -> None:
    """An uncompressed TIFF file of 8 x 8 pixels, of 8 bits a channel."""
    pixels = np.random.default_rng(0).integers(0, 256, 64 * channels, dtype=np.uint8).tobytes()
    tags = [(256, 3, [8]), (257, 3, [8]), (258, 3, [8] * channels), (259, 3, [1]), (262, 3, [photometric])]
    tags += [(273, 4, [8]), (277, 3, [channels]), (278, 3, [8]), (279, 4, [len(pixels)])]
    tags += [(338, 3, list(extra))] if extra else []
    start = 8 + len(pixels)
    behind, entries = b"", b""
    after = start + 2 + 12 * len(tags) + 4
    for tag, kind, values in tags:
        data = struct.pack(f"<{len(values)}{'H' if kind == 3 else 'I'}", *values)
        if len(data) > 4:
            place = struct.pack("<I", after + len(behind))
            behind += data
        else:
            place = data.ljust(4, b"\0")
        entries += struct.pack("<HHI", tag, kind, len(values)) + place
    header = b"II*\0" + struct.pack("<I", start)
    path.write_bytes(header + pixels + struct.pack("<H", len(tags)) + entries + b"\0" * 4 + behind)


@pytest.mark.parametrize(
    ("channels", "extra", "photometric"),
    [(4, (0,), 2), (5, (0, 0), 2), (8, (0,) * 7, 1)],
    ids=["one is left out by Pillow", "two are left out", "unknown to Pillow"],
)
def test_channels_that_are_no_colours_are_refused(
    tmp_path: Path, channels: int, extra: tuple[int, ...], photometric: int
) -> None:
    tiff(tmp_path / "1.tif", channels, extra=extra, photometric=photometric)
    message = rf"1\.tif .*?has {channels} channels, and at most 3 are supported; save three"
    with pytest.raises(RefusedError, match=message):
        source(tmp_path / "1.tif").decode(0)


def test_a_fourth_channel_of_transparency_is_read(tmp_path: Path) -> None:
    tiff(tmp_path / "1.tif", 4, extra=(2,))
    assert source(tmp_path / "1.tif").decode(0).shape == (3, 8, 8)


def test_a_tensor_of_more_channels_says_so() -> None:
    with pytest.raises(ValueError, match="has 5 channels, and at most 3 are supported"):
        picture_of(torch.zeros(5, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"is not an image; give \(H, W\)"):
        picture_of(torch.zeros(8, 8, 3, dtype=torch.uint8))


def dicom(path: Path) -> None:
    path.write_bytes(b"\0" * 128 + b"DICM" + b"\2\0\0\0UL\4\0")


def test_dicom_is_refused_by_name(tmp_path: Path, run_dir: Path) -> None:
    photos = save_photos(tmp_path / "photos")
    dicom(photos / "train" / "a" / "scan.dcm")
    [note] = list_folders(photos).notes
    assert ".dcm (1) (convert DICOM files to PNG, for example with pydicom or dcmj2pnm)" in note
    for image in (photos / "train" / "a").glob("*.png"):
        image.unlink()
    train = ["train", "--model", "shufflenet_v2_x0_5", "--epochs", "1", "--run-dir", str(run_dir), "--data"]
    refused(call(*train, "imagefolder", "--data-dir", str(photos)), 3, "holds no image", "convert DICOM files to PNG")
    dicom(photos / "scan.png")
    table = photos / "labels.csv"
    table.write_text("image,label\nscan.png,a\ntrain/b/00.png,b\ntrain/b/01.png,b\ntrain/b/02.png,b\n")
    refused(call(*train, str(table)), 3, "scan.png is a DICOM file, which is not supported; ")
