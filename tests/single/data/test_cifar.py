"""The CIFAR archives: read as torchvision's Python 2 pickles are, never run, downloaded completely or not at all."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest

from hvfreeze.data.cifar import ARCHIVES, read_archive
from hvfreeze.data.data_sets import open_data, prepare_data
from hvfreeze.errors import RefusedError

CLASSES = [f"class{number}" for number in range(10)]


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Writes {'data': pixels, 'labels': labels} as Python 2's numpy did: byte strings, and numpy's old home."""

    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value

    rows, columns = (b"J" + size.to_bytes(4, "little") for size in pixels.shape)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
        b"(K\x01(" + rows + columns + b"tcnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR"
        b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + text(pixels.tobytes()) + b"tb"
    )
    numbers = b"(" + b"".join(b"K" + bytes([label]) for label in labels) + b"l"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def write_cifar10(root: Path, *, protocol: int | None = 4) -> np.ndarray:
    """Writes an archive of 4 images a batch and returns all training pixels."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}, protocol=2))
    everything = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    for number, name in enumerate([*ARCHIVES["cifar10"].train, "test_batch"]):
        pixels, labels = everything[4 * number : 4 * number + 4], [(4 * number + row) % 10 for row in range(4)]
        old = protocol is None
        data = python2_batch(pixels, labels) if old else pickle.dumps({"data": pixels, "labels": labels}, protocol)
        (folder / name).write_bytes(data)
    return everything[:20].reshape(20, 3, 32, 32)


@pytest.mark.parametrize("protocol", [None, 4])
def test_both_python_2s_and_todays_pickles_give_the_pixels_in_order(tmp_path: Path, protocol: int | None) -> None:
    pixels = write_cifar10(tmp_path, protocol=protocol)
    splits = open_data("cifar10", tmp_path)
    assert splits.train.classes == tuple(CLASSES)
    assert splits.train.labels.tolist() == [row % 10 for row in range(20)]
    assert (len(splits.test), splits.notes) == (4, [])
    for sample_id in range(20):
        np.testing.assert_array_equal(splits.train.decode(sample_id), pixels[sample_id])


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["x"] * 100, "coarse_label_names": ["y"] * 20}))
    pixels = np.zeros((2, 3072), dtype=np.uint8)
    for name in ("train", "test"):
        content = {"data": pixels, "fine_labels": [99, 3], "coarse_labels": [19, 0]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    assert open_data("cifar100", tmp_path).train.labels.tolist() == [99, 3]


class Probe:
    """A pickle of this creates the file `path` when it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_that_wants_to_run_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    victim = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    victim.write_bytes(pickle.dumps({"data": Probe(tmp_path / "run"), "labels": []}, protocol=2))
    with pytest.raises(RefusedError, match=r"data_batch_3 .*refers to .*, which image data never needs"):
        open_data("cifar10", tmp_path)
    assert not (tmp_path / "run").exists()
    pickle.loads(victim.read_bytes())
    assert (tmp_path / "run").exists()


def batch(**changes: Any) -> bytes:
    return pickle.dumps({"data": np.zeros((4, 3072), dtype=np.uint8), "labels": [0, 1, 2, 3], **changes}, protocol=4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(pickle.dumps([1, 2])),
        lambda path: path.write_bytes(batch(labels=[0, 1, 2])),
        lambda path: path.write_bytes(batch(labels=[0, 1, 2, 10])),
        lambda path: path.write_bytes(batch(labels=["0", "1", "2", "3"])),
        lambda path: path.write_bytes(batch(data=np.zeros((4, 3072), dtype=np.float32))),
        lambda path: path.write_bytes(batch(data=np.zeros((4, 3071), dtype=np.uint8))),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    damage(path)
    with pytest.raises(RefusedError, match=r"data_batch_2 .*unpack the archive again"):
        read_archive(tmp_path, ARCHIVES["cifar10"])


def test_missing_class_names_are_refused_by_name(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES[:9]}))
    with pytest.raises(RefusedError, match=r"batches.meta does not hold 10 class names"):
        open_data("cifar10", tmp_path)


def pretend_torchvision(monkeypatch: pytest.MonkeyPatch, cifar10: Callable[..., object]) -> None:
    module = types.ModuleType("hvfreeze.torchvision_shim")
    module.torchvision = types.SimpleNamespace(datasets=types.SimpleNamespace(CIFAR10=cifar10))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hvfreeze.torchvision_shim", module)


def test_without_a_network_the_message_shows_three_ways_out_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(root: str, *, download: bool) -> None:
        (Path(root) / "cifar-10-python.tar.gz").write_bytes(b"half")
        raise URLError("no route to host")

    pretend_torchvision(monkeypatch, offline)
    with pytest.raises(RefusedError) as refusal:
        prepare_data("cifar10", tmp_path / "new")
    for word in (str(tmp_path), "no route", "cifar-10-batches-py/", "--data-dir", "$HVFREEZE_DATA", "--data digits"):
        assert word in str(refusal.value)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("late", [False, True], ids=["alone", "another job is done first"])
def test_a_download_appears_whole_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    calls = []

    def online(root: str, *, download: bool) -> None:
        calls.append(root)
        if late:
            write_cifar10(tmp_path)
        write_cifar10(Path(root))

    pretend_torchvision(monkeypatch, online)
    for _ in range(2):
        prepare_data("cifar10", tmp_path)
    assert len(calls) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["cifar-10-batches-py"]
    assert len(open_data("cifar10", tmp_path).train) == 20


@pytest.mark.parametrize("name", ["digits", "imagefolder", "cifar10"])
def test_what_needs_no_download_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def never(root: str, *, download: bool) -> None:
        raise AssertionError

    pretend_torchvision(monkeypatch, never)
    (tmp_path / "train").mkdir()
    prepare_data(name, tmp_path)
