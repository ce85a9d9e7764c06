"""Class folders: found completely, in a fixed order, and refused by name when they are no data set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvfreeze.data.folders import (
    Listing,
    PassedOver,
    find_splits,
    folders_of,
    images_below,
    is_folder,
    list_folders,
    scan,
    splits_in,
)
from hvfreeze.data.sizes import MOST_PROBED
from hvfreeze.errors import RefusedError
from tests.single.data.files import write_image


def test_paths_and_classes_are_sorted_as_bytes_and_other_files_passed_over(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.PNG", "a-b/1.png", "a/1.png", "a/deep/er/0.jpg", "a/Z.webp", "\u00e9/1.bmp"):
        write_image(tmp_path / name)
    for name in ("a/notes.txt", "a/.hidden.png", "README", ".cache/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    listing = scan(tmp_path)
    assert listing.classes == ("a", "a-b", "b", "\u00e9")
    assert listing.labels().tolist() == [1, 0, 0, 0, 2, 2, 3]
    assert listing.notes == (f"{tmp_path}: 2 files skipped, not images by their suffix: .txt (1), no suffix (1)",)
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
        f"{train}: 5 files skipped, not images by their suffix: .heic (3), .avif (1), .jfif (1)",
        f"{train}: 1 image outside class folders skipped",
    ]
    # Class folders alone: told once, although they make two splits.
    for number in range(1, 20):
        write_image(train / f"a/{number}.png")
        (train / f"b/1.x{number:02d}").touch()
    [_, others, _] = list_folders(train).notes
    assert "24 files" in others and others.endswith(".x05 (1) and 14 more")


@pytest.mark.parametrize(
    ("files", "folders", "message"),
    [
        ("", "", r"holds no class folders; expected .*/CLASS/IMAGE for at least 2 classes"),
        ("1.png", "", "holds no class folders"),
        ("a/1.png", "", r"one class only \(a\); training needs at least two"),
        ("a/1.png", "b", r"b holds no image \(.*\); add images or remove the folder"),
        ("a/1.png b/1.heic b/2.heic", "", r"b holds no image .* but \.heic \(2\); add"),
        ("val/a/1 val/b/1 test/a/1 test/b/1", "", "holds val and test only; it must hold train/"),
        ("train/a/1.png train/b/1.png", "", "holds train only; it must hold train/ with test/ or val/, or class"),
        ("Train/a/1 training/a/1 Test/a/1", "", "several train folders: Train, training; keep one of them, or name"),
        ("car/1.png train/1.png", "test", "train holds no class folders"),
        (
            "archive/cat/1.png archive/dog/1.png",
            "",
            r"only \(archive\).*\(cat, dog\) are the classes, name .*/archive",
        ),
        ("train/a/1.png train/b/1.png test/b/1.png test/z/1.png", "", "test/z is missing in .*train; add training"),
        ("train/a/1.png train/b/1.png", "test/b", r"test holds no image .* in its class folders; add images"),
    ],
)
def test_folders_that_cannot_be_a_data_set_are_refused_by_name(
    tmp_path: Path, files: str, folders: str, message: str
) -> None:
    for folder in folders.split():
        (tmp_path / folder).mkdir(parents=True)
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(RefusedError, match=message) as refusal:
        find_splits(tmp_path)
    assert str(tmp_path) in str(refusal.value)


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
    listing = Listing(root=tmp_path, classes=(), paths=paths)
    sizes = folders_of(tmp_path, {"train": listing}, []).sizes
    assert sizes.counts == {(4, 4): 2, (4, 6): MOST_PROBED - 2}
    assert sizes.examples == {(4, 4): f"{tmp_path}/000.png", (4, 6): f"{tmp_path}/001.png"}
    for path in paths:
        (tmp_path / path).write_bytes(b"no image")
    with pytest.raises(RefusedError, match=r"000\.png is not an intact image"):
        folders_of(tmp_path, {"train": listing}, [])


def test_one_pass_tells_sizes_and_times_and_an_equal_tree_elsewhere_is_known_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train/a/1", "train/b/2", "test/a/deep/3", "test/b/4"):
        write_image(tmp_path / "one" / f"{name}.png")
    other = shutil.copytree(tmp_path / "one", tmp_path / "other", copy_function=shutil.copyfile)
    read, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(path) or scandir(path))  # type: ignore[func-returns-value]
    found = list_folders(tmp_path / "one")
    assert len(read) == len(set(read)) == 8, "each folder is read once"
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


def test_a_val_folder_beside_test_is_not_used_and_that_is_said(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        write_image(tmp_path / name / "1.png")
    assert find_splits(tmp_path)[1] == [f"{tmp_path / 'val'} serves as the test set"]
    for name in ("test/a", "test/b"):
        write_image(tmp_path / name / "1.png")
    assert find_splits(tmp_path)[1] == [f"{tmp_path / 'val'} is not used: accuracy is measured on {tmp_path / 'test'}"]


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
    with pytest.raises(RefusedError, match=r"is a link to .*, a folder above it; remove it"):
        scan(tmp_path / "train")


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path: Path) -> None:
    for name in ("train/a/0.png", "train/b/0.png", "elsewhere/more/1.png"):
        write_image(tmp_path / name)
    (tmp_path / "train" / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "c").symlink_to(tmp_path / "elsewhere" / "more")
    assert scan(tmp_path / "train").paths == ("a/0.png", "a/linked/more/1.png", "b/0.png", "c/1.png")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("train test", "train test"),
        ("TRAIN VAL TEST", "train val test"),
        ("training validation", "train val"),
        ("trn dev eval", "train val test"),
        ("01_train 02-val 3.test", "train val test"),
        ("train2017 val2017", "train val"),
        ("TrainImages ValImages", "train val"),
        ("seg_train seg_test seg_pred", "train test"),
        ("TRAIN TEST TEST_SIMPLE", "train test"),
        ("train_station test_tube", ""),
        ("value valley vale", ""),
    ],
)
def test_splits_are_known_however_they_are_spelt(tmp_path: Path, names: str, found: str) -> None:
    for name in names.split():
        write_image(tmp_path / name / "a" / "1.png")
    assert " ".join(splits_in(tmp_path)) == found


def test_a_lone_folder_of_images_with_the_name_of_a_split_is_a_class(tmp_path: Path) -> None:
    for name in ("car", "train"):
        for number in range(2):
            write_image(tmp_path / name / f"{number}.png")
    assert find_splits(tmp_path)[0]["train"].classes == ("car", "train")


def test_folders_beside_the_splits_are_told(tmp_path: Path) -> None:
    for name in ("Train/a", "Train/b", "Test/a", "Test/b", "seg_pred", "@eaDir/a"):
        write_image(tmp_path / name / "1.png")
    assert find_splits(tmp_path)[1] == [
        f"{tmp_path}: folders other than the splits are skipped: seg_pred",
        f"{tmp_path}: 1 system folder skipped: @eaDir",
    ]


@pytest.mark.parametrize("where", ["", "train"])
def test_folders_with_the_same_folders_in_them_are_no_classes(tmp_path: Path, where: str) -> None:
    for name in ("one/disc", "one/square", "other/disc", "other/square", "other/more"):
        for number in range(2):
            write_image(tmp_path / where / name / f"{number}.png")
    with pytest.raises(RefusedError, match=r"holds one, other, which hold no images .*\(disc, square\): .*--data-dir"):
        scan(tmp_path / where)
    write_image(tmp_path / where / "one" / "1.png")
    assert scan(tmp_path / where).classes == ("one", "other"), "a class may be sorted"


def test_one_folder_in_each_class_is_no_sign_of_splits(tmp_path: Path) -> None:
    for name in ("cat/images", "dog/images"):
        write_image(tmp_path / name / "1.png")
    assert scan(tmp_path).classes == ("cat", "dog")


def test_a_test_set_may_lack_classes_and_that_is_said(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "train/c", "test/b"):
        write_image(tmp_path / name / "1.png")
    (tmp_path / "test" / "c").mkdir()
    listings, notes = find_splits(tmp_path)
    assert listings["test"].classes == ("a", "b", "c") and listings["test"].labels().tolist() == [1]
    assert notes == [f"{tmp_path / 'test'} has no image of 2 classes (a, c): accuracy does not cover them"]


def test_names_with_composed_and_decomposed_accents_are_one_class(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for name in (f"train/{composed}", "train/tea", f"test/{decomposed}", "test/tea"):
        write_image(tmp_path / name / "1.png")
    test = find_splits(tmp_path)[0]["test"]
    assert test.classes == (composed, "tea") and test.labels().tolist() == [0, 1]
    write_image(tmp_path / "train" / decomposed / "1.png")
    with pytest.raises(RefusedError, match=r"folders that look equal: 'caf.*' and 'caf.*', whose accents"):
        find_splits(tmp_path)


@pytest.mark.parametrize("name", ["Tea", "tea ", "te\u200ba"])
def test_what_differs_in_names_that_look_equal_is_said(tmp_path: Path, name: str) -> None:
    for place in ("train/tea", "train/x", f"test/{name}", "test/x"):
        write_image(tmp_path / place / "1.png")
    with pytest.raises(RefusedError) as refusal:
        find_splits(tmp_path)
    assert f"which has 'tea' instead of {name!a}; rename one" in str(refusal.value)


@pytest.mark.parametrize("system", ["@eaDir", "__MACOSX", "$RECYCLE.BIN", "lost+found"])
def test_folders_of_the_system_are_passed_over_wherever_they_are(tmp_path: Path, system: str) -> None:
    for name in ("a/1.png", "b/1.png", f"a/{system}/1.png", f"a/deep/{system}/more/1.png", f"{system}/a/1.png"):
        write_image(tmp_path / name)
    listing = scan(tmp_path)
    assert listing.paths == ("a/1.png", "b/1.png")
    assert listing.notes == (f"{tmp_path}: 3 system folders skipped: {system}",)
    passed = PassedOver()
    assert images_below(tmp_path, passed) == ["a/1.png", "b/1.png"] and passed.system == {system: 3}
