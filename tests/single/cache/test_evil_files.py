from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.format import NAMES, manifest_digest
from hvfreeze.cache.file.hdf5 import find_regions
from hvfreeze.cache.file.reader import ActivationFile
from tests.single.cache.material import make_keys, open_store, write_file

Change = Callable[[h5py.File, Path], object]


def replace(name: str, make: Change) -> Change:
    """Removes one dataset of a sound file and puts something else in its place."""

    def change(file: h5py.File, path: Path) -> None:
        del file[name]
        make(file, path)

    return change


def put(name: str, link: object) -> Change:
    def change(file: h5py.File, path: Path) -> None:
        file[name] = link

    return replace(name, change)


def make(name: str, shape: tuple[int, ...], dtype: object, **options: object) -> Change:
    return replace(name, lambda file, path: file.create_dataset(name, shape, dtype, **options))


def external(file: h5py.File, path: Path) -> None:
    secret = path.with_name("secret.bin")
    secret.write_bytes(b"TOPSECRET" * 100)
    file.create_dataset("activations", (40, 4), "<f4", external=[(str(secret), 0, 640)])


def virtual(file: h5py.File, path: Path) -> None:
    layout = h5py.VirtualLayout((40,), "<i8")
    layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "secret", (40,))
    file.create_virtual_dataset("sample_ids", layout)


def compact(file: h5py.File, path: Path) -> None:
    place = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    place.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"views", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((40,)), dcpl=place)


EVIL: dict[str, tuple[Change, str]] = {
    "external link": (put("activations", h5py.ExternalLink("other.h5", "/secret")), "soft or external link"),
    "group": (replace("views", lambda file, path: file.create_group("views")), "is not a dataset"),
    "extra entry": (lambda file, path: file.create_dataset("more", (2,), "<i4"), "7 entries"),
    "wrong name": (lambda file, path: file.move("views", "view"), "'views' is missing"),
    "external storage": (replace("activations", external), "another file"),
    "virtual": (replace("sample_ids", virtual), "virtual"),
    "compact": (replace("views", compact), "compact"),
    "bomb": (make("activations", (1 << 28, 4), "<f4", chunks=(1 << 20, 4), compression="gzip"), "chunked"),
    "absurd shape": (make("activations", (1 << 42, 4), "<f4"), "exceeds"),
    "never written": (make("activations", (40, 4), "<f4"), "exceeds"),
    "scalar": (make("views", (), "<i4"), "dimensions|inside|array"),
    "object references": (make("views", (40,), h5py.ref_dtype), "type"),
    "variable length": (make("views", (40,), h5py.vlen_dtype(np.int32)), "type"),
    "another shape": (
        replace("views", lambda f, path: f.create_dataset("views", data=np.zeros(39, "<i4"))),
        "manifest or tables",
    ),
    "two names": (
        replace("manifest_sha256", lambda f, path: f.__setitem__("manifest_sha256", f["manifest"])),
        "overlap",
    ),
}


@pytest.mark.parametrize("name", EVIL)
def test_a_file_that_leads_elsewhere_or_holds_anything_unexpected_is_refused(name: str, tmp_path: Path) -> None:
    path = write_file(tmp_path)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = np.arange(160.0, dtype="<f4").reshape(40, 4)
    change, reason = EVIL[name]
    with h5py.File(path, "r+") as file:
        change(file, path)
    with pytest.raises(CacheFault, match=rf"{path} refused: .*({reason})"):
        ActivationFile(path)
    with pytest.raises(CacheFault, match=str(path)):
        open_store(tmp_path, make_keys(40))


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and makes its digest fit, as somebody could who means harm."""
    descriptor, regions = find_regions(path, names=NAMES)
    os.close(descriptor)
    content = bytearray(path.read_bytes())

    def part(name: str) -> slice:
        return slice(regions[name].offset, regions[name].offset + regions[name].nbytes)

    value = json.loads(content[part("manifest")])
    change(value)
    content[part("manifest")] = json.dumps(value).encode().ljust(regions["manifest"].nbytes)
    content[part("manifest_sha256")] = manifest_digest(lambda name: [content[part(name)]], regions)
    path.write_bytes(content)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "more rows": (lambda value: value.update(capacity=41, rows=41), "the manifest says"),
    "more rows than there is room for": (lambda value: value.update(rows=41), "rows of"),
    "absurdly many rows": (lambda value: value.update(capacity=1 << 40, rows=1 << 40), "rows of"),
    "empty rows": (lambda value: value.update(shape=[0], strides=[1, 1]), "strides|contradicts|unreadable"),
    "strides that leave the row": (lambda value: value.update(strides=[4, 1000]), "strides"),
    "another type": (lambda value: value.update(stored="bfloat16", range_rows=131072), "the manifest says"),
    "an unknown type": (lambda value: value.update(stored="object"), "unreadable"),
    "another range": (lambda value: value.update(range_rows=1), "inconsistent"),
    "another version": (lambda value: value.update(version=2), "version 2"),
    "another identity": (lambda value: value["identity"].update(cut=3), "inconsistent"),
    "nothing": (lambda value: value.clear(), "unreadable"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_with_a_fitting_digest_is_refused(name: str, tmp_path: Path) -> None:
    path = write_file(tmp_path)
    change, reason = FORGED[name]
    forge(path, change)
    with pytest.raises(CacheFault, match=rf"{path} refused: .*({reason})"):
        ActivationFile(path)


def test_a_manifest_that_is_forged_into_itself_is_accepted(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    forge(path, lambda value: None)
    ActivationFile(path).verify()


def test_rewriting_a_dataset_with_its_own_contents_is_harmless(tmp_path: Path) -> None:
    """The tests above would also pass if every file touched by h5py was refused."""
    path = write_file(tmp_path)
    with h5py.File(path, "r+") as file:
        views = file["views"][:]
        del file["views"]
        file["views"] = views
    ActivationFile(path).verify()


def test_a_user_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "block.h5"
    with h5py.File(path, "w", userblock_size=512):
        pass
    with pytest.raises(CacheFault, match="user block"):
        ActivationFile(path)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "empty", "text", "absent", "device"])
def test_what_is_no_regular_hdf5_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    if kind == "link":
        path.symlink_to(write_file(tmp_path))
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    elif kind != "absent":
        path.write_text("no cache\n" * (kind == "text"))
    with pytest.raises(CacheFault, match=f"{path} refused"):
        ActivationFile(path)


def test_the_hdf5_library_may_load_no_plugins() -> None:
    assert os.environ["HDF5_PLUGIN_PRELOAD"] == "::"
