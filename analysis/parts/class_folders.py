"""Folders of images as `--data imagefolder` reads them: FOLDER/{train,test}/CLASS."""

from __future__ import annotations

from pathlib import Path


def class_folder(folder: Path, part: str, label: object) -> Path:
    """Return the folder of a class, made if it is missing."""
    place = folder / part / str(label)
    place.mkdir(parents=True, exist_ok=True)
    return place


def files_of_classes(folder: Path, part: str) -> dict[str, list[Path]]:
    """Return the files of each class, sorted; empty if there is no such folder."""
    files = sorted(path for path in (folder / part).glob("*/*") if path.is_file())
    names = sorted({path.parent.name for path in files})
    return {name: [path for path in files if path.parent.name == name] for name in names}
