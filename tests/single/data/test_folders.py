"""Class folders: found completely, in a fixed order, and refused by name when they are no data set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from hvfreeze.data.folders import Listing, find_splits, is_folder, list_folders, scan
from hvfreeze.errors import RefusedError


def write_image(path: Path, *, width: int = 8, height: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)


def test_paths_and_classes_are_sorted_as_bytes_and_other_files_passed_over(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.PNG", "a-b/1.png", "a/1.png", "a/deep/er/0.jpg", "a/Z.webp", "\u00e9/1.bmp"):
        write_image(tmp_path / name)
    for name in ("a/notes.txt", "a/.hidden.png", "README", ".cache/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    listing = scan(tmp_path)
    assert listing.classes == ("a", "a-b", "b", "\u00e9")
    assert listing.labels() == [1, 0, 0, 0, 2, 2, 3]
    assert listing.notes == (
        f"{tmp_path}: 2 files are passed over, no images by their suffix: .txt (1), no suffix (1)",
    )
    assert listing.paths == (
        "a-b/1.png",
        "a/1.png",
        "a/Z.webp",
        "a/deep/er/0.jpg",
        "b/10.PNG",
        "b/2.png",
        "\u00e9/1.bmp",
    )


def test_files_that_are_passed_over_are_counted_by_suffix_and_told(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("a/1.png", "b/1.png"):
            write_image(tmp_path / part / name)
    write_image(tmp_path / "train" / "loose.png")
    for name in ("a/1.heic", "a/2.HEIC", "a/deep/3.heic", "b/1.avif", "b/1.jfif", "b/.hidden"):
        (tmp_path / "train" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "train" / name).touch()
    train = tmp_path / "train"
    assert list_folders(tmp_path).notes == [
        f"{train}: 5 files are passed over, no images by their suffix: .heic (3), .avif (1), .jfif (1)",
        f"{train}: 1 image lies in no class folder and is passed over",
    ]
    # Class folders alone: told once, although they make two splits.
    for number in range(1, 20):
        write_image(train / f"a/{number}.png")
        (train / f"b/1.x{number:02d}").touch()
    [_, others, _] = list_folders(train).notes
    assert "24 files" in others and others.endswith(".x05 (1) and 14 more suffixes")


@pytest.mark.parametrize(
    ("files", "folders", "words"),
    [
        ([], [], ["holds no class folders", "CLASS/IMAGE"]),
        (["1.png"], [], ["holds no class folders"]),
        (["a/1.png"], [], ["one class only (a)", "at least two"]),
        (["a/1.png"], ["b"], ["b holds no image", "remove the folder"]),
        (["a/1.png", "b/1.heic", "b/2.heic"], [], ["b holds no image", "but .heic (2); add"]),
    ],
)
def test_folders_that_cannot_be_a_data_set_are_refused_by_name(
    tmp_path: Path, files: list[str], folders: list[str], words: list[str]
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir()
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(RefusedError) as refusal:
        scan(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(refusal.value)


def test_where_one_class_suffices_no_more_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"for at least 1 class$"):
        scan(tmp_path, fewest=1)


@pytest.mark.parametrize("kind", ["missing", "a file", "a loop", "locked"])
def test_folders_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "data"
    if kind == "a file":
        folder.touch()
    if kind == "a loop":
        folder.symlink_to(folder)
    if kind == "locked":
        # Some users may read everything, so a mode alone locks nothing.
        monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(RefusedError, match=r"data cannot be read \(.+\); check --data-dir"):
        scan(folder)


def test_probing_finds_sizes_in_both_ends_and_a_file_for_each(tmp_path: Path) -> None:
    paths = tuple(f"{row:03}.png" for row in range(100))
    for row, path in enumerate(paths):
        write_image(tmp_path / path, width=4 if row in (0, 99) else 6, height=4)
    sizes = Listing(root=tmp_path, classes=(), paths=paths).sizes()
    assert sizes == {(4, 4): tmp_path / "000.png", (4, 6): tmp_path / sizes[4, 6].name}


def test_one_pass_tells_sizes_and_times_and_an_equal_tree_elsewhere_is_known_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train/a/1", "train/b/2", "test/a/deep/3", "test/b/4"):
        write_image(tmp_path / "one" / f"{name}.png")
    other = shutil.copytree(tmp_path / "one", tmp_path / "other", copy_function=shutil.copyfile)
    read, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(path) or scandir(path))  # type: ignore[func-returns-value]
    found = list_folders(tmp_path / "one")
    assert len(read) == len(set(read)) == 7, "each folder is read once"
    status = (tmp_path / "one/train/b/2.png").stat()
    listing = found.listings["train"]
    assert (listing.num_bytes[1], listing.times[1]) == (status.st_size, status.st_mtime_ns)
    there = list_folders(other)
    assert there.digest() == found.digest() and there.local != found.local
    moved = found.to_send().here(other, there.local)
    for name, listing in there.listings.items():
        assert moved.listings[name].root == listing.root and moved.listings[name].paths == listing.paths
    assert moved.local == there.local
    with (other / "test/b/4.png").open("ab") as file:
        file.write(b"x")
    assert list_folders(other).digest() != found.digest()
    os.utime(tmp_path / "one/test/b/4.png", ns=(2, 2))
    touched = list_folders(tmp_path / "one")
    assert touched.digest() == found.digest() and touched.local["test"] != found.local["test"]
    (other / "test/b/4.png").unlink()
    (other / "test/b/4.png").symlink_to("nowhere")
    gone = list_folders(other).listings["test"]
    assert gone.num_bytes[gone.paths.index("b/4.png")] == 0, "whoever reads it tells of it"


def test_a_folder_behind_a_locked_one_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "is_dir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(RefusedError, match=r"data cannot be read \(Permission denied\)"):
        is_folder(tmp_path / "data")


def test_val_and_test_without_train_are_not_taken_for_classes(tmp_path: Path) -> None:
    for name in ("val/a", "val/b", "test/a", "test/b"):
        write_image(tmp_path / name / "1.png")
    with pytest.raises(RefusedError, match=r"holds val and test alone; it must hold train/"):
        find_splits(tmp_path)


def test_a_val_folder_beside_test_is_not_used_and_that_is_said(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        write_image(tmp_path / name / "1.png")
    assert find_splits(tmp_path)[1] == [f"{tmp_path / 'val'} serves as the test set"]
    for name in ("test/a", "test/b"):
        write_image(tmp_path / name / "1.png")
    assert find_splits(tmp_path)[1] == [f"{tmp_path / 'val'} is not used: accuracy is on {tmp_path / 'test'}"]


@pytest.mark.parametrize("link", ["train/a/loop", "train/loop"])
@pytest.mark.parametrize("target", ["train", "train/a", ".", "outside"])
def test_a_link_to_a_folder_that_it_lies_in_is_refused_by_name(tmp_path: Path, link: str, target: str) -> None:
    for name in ("train/a/0.png", "train/b/0.png", "test/a/0.png", "test/b/0.png", "outside/0.png"):
        write_image(tmp_path / name)
    (tmp_path / "outside" / "back").symlink_to(tmp_path / link.rpartition("/")[0])
    (tmp_path / link).symlink_to(tmp_path / target)
    if (link, target) == ("train/loop", "train/a"):
        assert "loop/0.png" in scan(tmp_path / "train").paths, "the same folder twice is no circle"
        return
    with pytest.raises(RefusedError, match=r"is a link to .*, in which it lies itself; remove it"):
        scan(tmp_path / "train")


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path: Path) -> None:
    for name in ("train/a/0.png", "train/b/0.png", "elsewhere/more/1.png"):
        write_image(tmp_path / name)
    (tmp_path / "train" / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "c").symlink_to(tmp_path / "elsewhere" / "more")
    assert scan(tmp_path / "train").paths == ("a/0.png", "a/linked/more/1.png", "b/0.png", "c/1.png")
