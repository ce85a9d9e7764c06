"""The trainings of `make demo`, in order, and their images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from hvfreeze.data.data_sets import DataSplits, ImageSet, open_data

FIRST_HALF, SECOND_HALF = range(5), range(5, 10)
PRETRAINED = "pretrained"
CIFAR_PER_CLASS = {"train": 500, "test": 100}
# Checkpoints would be most of what such short runs write and wait for; the model is kept at the end all the same.
COMMON = ("--model", "resnet18", "--schedule", "cosine", "--checkpoint-every", "0")
AUTO = ("--model", "resnet18", "--checkpoint-every", "0")

Flags = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The images of the demo and the flags of its trainings."""

    first: str
    second: str
    pretraining: Flags
    tuning: Flags
    vote: Flags
    auto: Flags
    """Flags of `hvfreeze auto`, which needs no learning rate."""


# A mirrored digit is no digit: the folder's images are taken as they are, which also makes every epoch cacheable.
DIGITS = Task(
    first="the digits 0 to 4",
    second="the digits 5 to 9",
    pretraining=("--augment", "none", "--batch-size", "24", "--epochs", "6", "--lr", "0.05"),
    tuning=("--augment", "none", "--batch-size", "24", "--epochs", "10", "--lr", "0.01"),
    vote=("--freeze", "percentile", "--interval", "4", "--eta-max", "1", "--vote-weight", "loss"),
    auto=("--batch-size", "24"),
)
CIFAR = Task(
    first="the first half of CIFAR-10's classes",
    second="CIFAR-10, 3000 images",
    pretraining=("--batch-size", "16", "--epochs", "8", "--lr", "0.02"),
    tuning=("--augment", "views:2", "--train-samples", "3000", "--batch-size", "25", "--epochs", "5", "--lr", "0.01"),
    vote=("--freeze", "percentile", "--interval", "12", "--eta-max", "1", "--vote-weight", "loss"),
    auto=("--train-samples", "3000", "--batch-size", "25"),
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of the program."""

    title: str
    run_dir: Path
    flags: Flags
    command: Flags = ("train",)
    """The command, and the data of `hvfreeze auto`."""


def plan(out: Path, *, data_dir: Path | None, weights: Path | None) -> list[Stage]:
    """Write the images of the halves and return the stages in order."""
    first, second = out / "first-half", out / "second-half"
    if data_dir is None:
        for folder, classes in ((first, FIRST_HALF), (second, SECOND_HALF)):
            write_images(open_data("digits"), classes=classes, folder=folder)
        data: Flags = ("--data", "imagefolder", "--data-dir", str(second))
        task = DIGITS
    else:
        if weights is None:
            write_images(open_data("cifar10", data_dir), classes=FIRST_HALF, folder=first, most=CIFAR_PER_CLASS)
        data = ("--data", "cifar10", "--data-dir", str(data_dir))
        task = CIFAR
    stages = []
    if weights is None:
        flags = ("--data", "imagefolder", "--data-dir", str(first), *task.pretraining, *COMMON)
        stages.append(Stage(title=f"pretrain on {task.first}", run_dir=out / PRETRAINED, flags=flags))
        weights = out / PRETRAINED / "model.pt"
    tuning = (*data, *task.tuning, *COMMON, "--weights", str(weights))
    stages.append(Stage(title=f"fine-tune in full on {task.second}", run_dir=out / "full", flags=tuning))
    frozen = (*tuning, *task.vote)
    cached = (*frozen, "--cache", "auto")
    stages.append(Stage(title="the same, frozen by vote", run_dir=out / "voted", flags=frozen))
    stages.append(Stage(title="the same again, frozen blocks' output cached", run_dir=out / "cached", flags=cached))
    place: Flags = ("auto", str(second)) if data_dir is None else ("auto", "cifar10", "--data-dir", str(data_dir))
    auto = (*task.auto, *AUTO, "--weights", str(weights))
    title = "hvfreeze auto: fine-tune where that pays, and fit the head"
    stages.append(Stage(title=title, run_dir=out / "auto", flags=auto, command=place))
    return stages


def write_images(
    splits: DataSplits, *, classes: Iterable[int], folder: Path, most: Mapping[str, int] | None = None
) -> None:
    """Write the images of some classes as PNG files, `folder`/{train,test}/<class>/*.png, at most so many a class."""
    wanted = frozenset(classes)
    for part, images in (("train", splits.train), ("test", splits.test)):
        chosen = chosen_ids(images, wanted, most=(most or {}).get(part))
        for sample in chosen:
            path = folder / part / images.classes[int(images.labels[sample])] / f"{sample:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images.decode(sample).transpose(1, 2, 0)).save(path)


def chosen_ids(images: ImageSet, classes: frozenset[int], *, most: int | None) -> list[int]:
    """Return the ids of the first `most` samples of each class, of all where it is None."""
    taken = dict.fromkeys(classes, 0)
    chosen = []
    for sample, label in enumerate(images.labels.tolist()):
        if label in classes and (most is None or taken[label] < most):
            taken[label] += 1
            chosen.append(sample)
    return chosen
