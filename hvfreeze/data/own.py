"""Custom datasets: the images and labels that a user's function returns, and its broken samples."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hvfreeze.data.images import BrokenImagesError, oddities
from hvfreeze.data.reading import (
    USUAL,
    PixelArray,
    Reading,
    TooLargeError,
    allow_large_images,
    picture_of,
    sized_pixels,
    to_rgb,
    too_large,
    turn_of,
)
from hvfreeze.data.sizes import ImageSizes, Size, rows_probed
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.row_weights import find_odd_weight
from hvfreeze.tasks import TASKS
from hvfreeze.user_code import HF, call, code_sha256, is_named_code, told
from hvfreeze.wording import plural, reason_in_a_line


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetSource:
    """The images of a map-style Dataset, read one at a time: it may not be thread-safe."""

    name: str
    dataset: Any
    image_shape: tuple[int, int, int]
    """Shape of a decoded image, (C, H, W)."""
    side: int | None
    """Side of the square that images are fitted to, in pixels; None accepts images of `image_shape` only."""
    reading: Reading = USUAL
    oblong: bool = True
    """Whether a probed image is not square."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decode(self, row: int) -> PixelArray:
        """Return the (C, H, W) uint8 pixels of one image.

        Raises:
            RefusedError: the dataset fails or returns no image.
            UsageError: the image has another size than the others, without --image-size.
        """
        with self._lock:
            rgb = read_image(self.name, self.dataset, row, reading=self.reading)
        place = f"--data ({self.name}): sample {row}"
        return sized_pixels(rgb, side=self.side, image_shape=self.image_shape, reading=self.reading, place=place)

    def identity(self, *, local: bool) -> str:
        """Return a digest of the code, of `rows_probed`, and of the dataset's `version`.

        With `local`, for cache rows, it also covers the dataset's `local_version`, and the reading if the dataset
        returns PIL images: the reading may change any of them.
        """
        # A dataset on disk may be moved.
        name = HF if self.name.startswith(HF) else self.name
        code = code_sha256("data", name) if is_named_code(name) else ""
        digest = hashlib.sha256(f"{name} {code} {self.image_shape} {self.side}".encode())
        digest.update(f"{len(self.dataset)} {getattr(self.dataset, 'version', '')}".encode())
        pictures = False
        for row in rows_probed(len(self.dataset)):
            # Loading the pixels reports all broken images together.
            with suppress(RefusedError):
                digest.update(self.decode(row).tobytes())
                pictures |= isinstance(sample(self.name, self.dataset, row)[0], Image.Image)
        version, background, fit = self.reading.version, self.reading.background, self.reading.fit
        if local:
            digest.update(str(getattr(self.dataset, "local_version", "")).encode())
        if local and version > 1 and pictures:
            digest.update(f"reading {version} {background if version > 2 else ''}".rstrip().encode())
        if self.side is not None and fit != "crop":
            digest.update(f"{fit} {background}".encode())
        if self.side is not None and self.reading.resample != USUAL.resample:
            digest.update(self.reading.resample.encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class OwnSplit:
    """One split of a custom dataset."""

    source: DatasetSource
    kind: str
    """The kind of labels, a key of `tasks.TASKS`."""
    labels: Tensor
    """Labels, (N,) int64 or (N, outputs) float32, of numbers float64."""
    broken: Mapping[int, str]
    """Unreadable samples with the reasons; their labels are placeholders."""
    weights: Tensor | None
    """Sample weights, (N,) float64, of the training split; None means equal weights."""
    classes: tuple[str, ...] | None
    flips: bool
    notes: list[str]


def open_own(
    name: str,
    directory: str | None,
    *,
    image_size: int | None,
    reading: Reading = USUAL,
    skip_bad: bool = False,
    task: str = "auto",
    made: Mapping[str, Any] | None = None,
    side_if_unequal: int | None = None,
) -> dict[str, OwnSplit]:
    """Return the splits `train` and `test` that the function `name` makes, with images of `one_shape`.

    `task` is a key of `tasks.TASKS`, or auto: the dataset's attribute `task`, else inferred from its training labels.
    `made` holds datasets that exist already. `side_if_unequal` replaces an `image_size` of None if images differ in
    size.

    Raises:
        UsageError: there is no such function, or it fails; or images differ in size and `image_size` is None.
        RefusedError: the function does not return a dataset of images with labels.
        BrokenImagesError: samples are unreadable, and `skip_bad` is False; names them all.
    """
    if made is None:
        made = {split: make(name, directory, split) for split in ("train", "test")}
    given = getattr(made["train"], "task", "auto") if task == "auto" else task
    if given != "auto" and given not in TASKS:
        raise RefusedError(f"--data ({name}): the dataset's task ({given}) must be one of {', '.join(TASKS)}")
    said = {split: labels_of(name, dataset) for split, dataset in made.items()}
    kind = kind_of(said["train"][0]) if given == "auto" else given
    labels = {split: (tensor_of(name, split, *found, kind=kind), found[1]) for split, found in said.items()}
    if len({found.shape[1:] for found, _ in labels.values()}) > 1:
        lengths = " and ".join(f"{found.shape[1]} entries in {split}" for split, (found, _) in labels.items())
        raise RefusedError(f"--data ({name}): labels have {lengths}; both splits must have the same number")
    broken = [reason for _, reasons in labels.values() for reason in reasons.values()]
    if broken and not skip_bad:
        raise BrokenImagesError(broken)
    sizes, special = ImageSizes(), {split: Counter[str]() for split in made}

    def look(split: str, row: int) -> tuple[Size, str]:
        image, label = sample(name, made[split], row)
        if targets_of(made[split]) is not None:
            check_target(f"--data ({name}): sample {row} of {split}", label, target=said[split][0][row])
        rgb = rgb_of(name, row, image, reading=reading, special=special[split])
        return (rgb.height, rgb.width), f"{split} sample {row}"

    for split, dataset in made.items():
        sizes.probe(len(dataset), partial(look, split))
    shape, side, cut = sizes.one_shape(image_size, fit=reading.fit, default=side_if_unequal, told=f"--data ({name}): ")
    return {
        split: OwnSplit(
            kind=kind,
            source=DatasetSource(
                name=name,
                dataset=dataset,
                image_shape=shape,
                side=side,
                reading=reading,
                oblong=sizes.oblong,
            ),
            labels=labels[split][0],
            broken=labels[split][1],
            weights=weights_of(name, dataset) if split == "train" else None,
            classes=None if getattr(dataset, "classes", None) is None else tuple(map(str, dataset.classes)),
            flips=bool(getattr(dataset, "flips", True)),
            notes=[
                *(cut if split == "train" else []),
                *(
                    f"of {plural(len(rows_probed(len(dataset))), f'{split} image')} probed, {n} {what}"
                    for what, n in special[split].items()
                ),
            ],
        )
        for split, dataset in made.items()
    }


def make(name: str, directory: str | None, split: str) -> Any:
    """Return the dataset that a function makes; see `open_own`."""
    allow_large_images()
    dataset = call("data", name, split=split, **({} if directory is None else {"data_dir": directory}))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or len(dataset) == 0:
        raise RefusedError(f"--data ({name}) must return a Dataset with a length above 0, not {type(dataset).__name__}")
    return dataset


Label = int | float | list[float]


def labels_of(name: str, dataset: Any) -> tuple[list[Label | None], dict[int, str]]:
    """Return the label of each sample, and the unreadable samples with the reasons; their label is None.

    Raises:
        RefusedError: a label is neither a number nor a list of numbers.
    """
    known = targets_of(dataset)
    labels, broken = list[Label | None](), {}
    for row in range(len(dataset)):
        try:
            label = known[row] if known is not None else sample(name, dataset, row)[1]
        except TooLargeError:
            raise
        except RefusedError as error:
            broken[row] = str(error)
            labels.append(None)
            continue
        plain = plain_of(label)
        if isinstance(plain, (list, tuple)) and plain and all(type(each) in (int, float, bool) for each in plain):
            plain = [float(each) for each in plain]
        elif type(plain) not in (int, float):
            raise RefusedError(
                f"--data ({name}): the label of sample {row} ({label!r}) must be a whole number from 0 for one class, "
                "a list of 0 and 1 for several labels, or a number, or a list of them, for regression"
            )
        if not np.isfinite(plain).all():
            raise RefusedError(f"--data ({name}): the label of sample {row} ({label!r}) must be finite")
        labels.append(plain)
    return labels, broken


def targets_of(dataset: Any) -> Any | None:
    """Return the attribute `targets` of a dataset if it has an entry for each sample, else None."""
    targets = getattr(dataset, "targets", None)
    return targets if targets is not None and len(targets) == len(dataset) else None


def plain_of(label: Any) -> Any:
    """Return a label without arrays and tensors."""
    return label.tolist() if isinstance(label, (np.generic, np.ndarray, Tensor)) else label


def check_target(place: str, label: Any, *, target: Label | None) -> None:
    """Compare a sample's label with its entry of `targets`; other forms, such as names or one-hot, are ignored.

    Raises:
        UsageError: they differ by more than rounding to bfloat16.
    """
    if (plain := plain_of(label)) is None:
        return
    try:
        found, expected = (np.ravel(np.asarray(each, np.float64)) for each in (plain, target))
    except (TypeError, ValueError):
        return
    if found.shape != expected.shape:
        return
    are_whole = not (found % 1).any() and not (expected % 1).any()
    if not (np.array_equal(found, expected) if are_whole else np.allclose(found, expected, rtol=0.01, atol=1e-6)):
        raise UsageError(
            f"{place} has the label {plain}, but the dataset's attribute targets has {target}; make them equal, or "
            "return a dataset without targets, whose labels are read from the samples"
        )


def weights_of(name: str, dataset: Any) -> Tensor | None:
    """Return the attribute `sample_weight` of a dataset, (N,) float64. Raises RefusedError for invalid weights."""
    given = getattr(dataset, "sample_weight", None)
    if given is None:
        return None
    place = f"--data ({name}): sample_weight of the training set"
    try:
        weights = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{place} must be numbers: {told(error)}") from error
    if weights.shape != (len(dataset),):
        raise RefusedError(
            f"{place} has the shape {weights.shape}; it must have one number for each of {len(dataset)} samples"
        )
    odd = find_odd_weight(weights)
    if odd is not None:
        raise RefusedError(f"{place}: {weights[odd]} of sample {odd} must be a number of at least 0")
    if not weights.any():
        raise RefusedError(f"{place} must not be 0 for all samples")
    return torch.from_numpy(weights.copy())


def kind_of(labels: Sequence[Label | None]) -> str:
    """Return the inferred task: labels for lists of 0 and 1, numbers for other lists and fractions, else classes.

    Lists of one number are numbers.
    """
    known = [each if isinstance(each, list) else [each] for each in labels if each is not None]
    if any(len(each) > 1 for each in known):
        return "labels" if all(entry in (0, 1) for each in known for entry in each) else "numbers"
    return "numbers" if any(type(entry) is float and entry % 1 for each in known for entry in each) else "classes"


def tensor_of(name: str, split: str, labels: Sequence[Label | None], broken: Mapping[int, str], *, kind: str) -> Tensor:
    """Return labels as a tensor of the task `kind`, 0 for broken samples. Raises RefusedError for an invalid label."""
    rows = [each if isinstance(each, list) else [each] for each in labels if each is not None]
    width = 1 if kind == "classes" else max(map(len, rows), default=1)
    wanted, right = {
        "classes": ("a whole number from 0", lambda entry: entry % 1 == 0 and entry >= 0),
        "labels": (f"0 or 1, {width} times", lambda entry: entry in (0, 1)),
        "numbers": (plural(width, "number"), lambda entry: True),
    }[kind]
    whole = []
    for row, label in enumerate(labels):
        entries = [0.0] * width if label is None else label if isinstance(label, list) else [label]
        if len(entries) != width or not all(map(right, entries)):
            raise RefusedError(
                f"--data ({name}): the label of sample {row} of {split} ({label!r}) must be {wanted} "
                f"with --task {kind}; correct it or choose another --task"
            )
        whole.append(entries)
    if kind == "classes":
        return torch.tensor([int(entry) for entries in whole for entry in entries], dtype=torch.int64)
    kept = torch.float64 if kind == "numbers" else torch.float32
    return torch.tensor(whole, dtype=kept).reshape(-1, width)


def sample(name: str, dataset: Any, row: int) -> tuple[Any, Any]:
    """Return the image and the label of a sample, which is a pair or a dictionary.

    Raises:
        RefusedError: the dataset fails or returns nothing.
        UsageError: it returns something else, probably for all samples.
    """
    place = f"--data ({name}): sample {row}"
    try:
        found = dataset[row]
        if found is None:
            raise ValueError("it is None")
    except HvfreezeError:
        raise
    except Image.DecompressionBombError as error:
        raise too_large(place, error) from error
    except Exception as error:  # the user's dataset may fail in any way
        raise RefusedError(f"{place} cannot be read as (image, label): {told(error)}") from error
    if isinstance(found, Mapping):
        image, label = ([key for key in keys if key in found] for keys in (IMAGE_KEYS, LABEL_KEYS))
        if len(image) == len(label) == 1:
            return found[image[0]], found[label[0]]
        raise UsageError(
            f"{place} is a dictionary with the keys {', '.join(map(str, found))}; one of {', '.join(IMAGE_KEYS)} must "
            f"hold the image, and one of {', '.join(LABEL_KEYS)} the label, or return (image, label)"
        )
    try:
        image, label = found[:2]
    except Exception as error:
        raise UsageError(
            f"{place} cannot be read as (image, label): {type(error).__name__}: {error}; it is a "
            f"{type(found).__name__}, and must be a pair or a dictionary with image and label"
        ) from error
    return image, label


IMAGE_KEYS = ("image", "img", "picture", "pixels", "pixel_values")
LABEL_KEYS = ("label", "labels", "target", "class", "class_id", "y")
"""Keys of samples that are dictionaries."""


def read_image(name: str, dataset: Any, row: int, *, reading: Reading = USUAL) -> Image.Image:
    """Return a sample's image in RGB; raises like `sample` and `rgb_of`."""
    return rgb_of(name, row, sample(name, dataset, row)[0], reading=reading)


def rgb_of(
    name: str, row: int, image: Any, *, reading: Reading = USUAL, special: Counter[str] | None = None
) -> Image.Image:
    """Return the image of sample `row` in RGB, and count special conversions in `special`.

    Raises:
        RefusedError: it is not an image, is damaged, or its numbers have no known range.
    """
    try:
        if isinstance(image, Tensor) and image.is_floating_point():
            if not (float(image.min()) >= 0 and float(image.max()) <= 1):
                raise ValueError("its numbers are not in 0..1; return images before normalisation")
            image = image.mul(255).round().to(torch.uint8)
        if not isinstance(image, Image.Image):
            return to_rgb(picture_of(image), reading=reading)
        if special is not None and reading.version > 1:
            special.update(oddities(image, turn_of))
        return to_rgb(image, reading=reading)
    # Pillow may decode the file only here, and raises errors of many kinds on a damaged one.
    except Exception as error:
        reason = reason_in_a_line(error)
        raise RefusedError(f"--data ({name}): the image of sample {row} cannot be used: {reason}") from error
