"""A model's card, `model.yaml`: its entries, their rules and the image preprocessing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch import Tensor

from hvfreeze import __version__
from hvfreeze.config.data import FITS, MOST_PIXELS, RESAMPLES
from hvfreeze.config.head import TOKENS
from hvfreeze.data.reading import (
    READING,
    Colour,
    PixelArray,
    Reading,
    fitted,
    picture_of,
    read_rgb,
    to_pixels,
    to_rgb,
)
from hvfreeze.data.text import encode
from hvfreeze.data.views import Augment, Transform, Triple
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.plain_yaml import parse_plain_yaml
from hvfreeze.runs.files import publish
from hvfreeze.runs.reading import read_bytes
from hvfreeze.tasks import TASKS, Numbers, Task


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The preprocessing of images of any size to normalised float tensors, without augmentation.

    Takes a PIL image or a uint8 tensor, (H, W), (C, H, W) or (N, C, H, W) with C of 1 or 3, and returns (3, S, S) or
    (N, 3, S, S) float32. Raises UsageError for other values. A large opened JPEG file is decoded at a reduced scale, as
    in training, and keeps that size.
    """

    height: int
    width: int
    """Width in pixels to which images are resized by `fit` and `resample`; `height` likewise."""
    cropped_to: int | None
    """Side of the centre crop in pixels; None keeps the whole image."""
    enlarged_to: int | None
    """Side in pixels to which the image is enlarged after normalisation (bilinear); None keeps its size."""
    mean: Triple
    """Mean per channel, for pixels scaled to 0-1."""
    std: Triple
    reading: int = READING
    """Version of the conversion from files to pixels; see `data.reading.READING`."""
    background: Colour = (255, 255, 255)
    fit: str = "crop"
    """Fit of images with other proportions; see `data.reading.fitted`."""
    resample: str = "bilinear"
    """Resampling filter."""

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Return the model's input for an image or a batch of images."""
        if isinstance(image, Tensor) and image.ndim == 4:
            return self.normalised(torch.stack([torch.from_numpy(self.pixels(each)) for each in image]))
        return self.normalised(torch.from_numpy(self.pixels(image))[None])[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the model's input, (C, H, W)."""
        side = self.enlarged_to or self.cropped_to
        return (3, side or self.height, side or self.width)

    @property
    def how(self) -> Reading:
        """The settings of reading and fitting images."""
        return Reading(version=self.reading, background=self.background, fit=self.fit, resample=self.resample)

    def pixels(self, image: Image.Image | Tensor) -> PixelArray:
        """Return (3, height, width) uint8. Raises UsageError for values that are not images with a known range."""
        try:
            picture = image if isinstance(image, Image.Image) else picture_of(image)
            rgb = to_rgb(picture, reading=self.how, side=max(self.height, self.width))
        except ValueError as error:
            raise UsageError(f"the image cannot be used: {error}") from error
        return to_pixels(fitted(rgb, self.height, self.width, reading=self.how))

    def pixels_of(self, path: Path) -> PixelArray:
        """Return an image file's (3, height, width) uint8. Raises RefusedError, with its name, for a damaged file."""
        rgb = read_rgb(path, reading=self.how, side=max(self.height, self.width))
        return to_pixels(fitted(rgb, self.height, self.width, reading=self.how))

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return (N, 3, S, S) float32, channels last, for (N, 3, height, width) uint8."""
        return self._transform.clean(pixels).contiguous(memory_format=torch.channels_last)

    @cached_property
    def _transform(self) -> Transform:
        return Transform(
            data_seed=0,
            augment=Augment("none", 1),
            pad=0,
            flips=False,
            mean=self.mean,
            std=self.std,
            image_size=self.enlarged_to,
            cropped_to=self.cropped_to,
        )


@dataclass(frozen=True, kw_only=True)
class TextPreparation:
    """The conversion of a text to the codes of its last characters, (1, T) int64 with T at most `context`."""

    characters: tuple[str, ...]
    """Vocabulary in the order of the codes; the last entry stands for all other characters."""
    context: int

    def __call__(self, text: str) -> Tensor:
        """Return the codes. Raises UsageError for an empty text."""
        if not text:
            raise UsageError("the text is empty; give at least one character")
        return torch.from_numpy(encode(text[-self.context :], self.characters)).long()[None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's input, (T,)."""
        return (self.context,)


FORMAT = 1
PRECISIONS = ("float32", "bfloat16")
MOST_BYTES = 2**24
"""Largest card in bytes: names of about 200,000 classes."""
LARGEST_DECODED, LARGEST_AREA = 2**16, 2**28
"""Largest side and area of images in pixels; Pillow does not open larger ones."""
MOST_ROWS = 2**20


def _whole(most: int, *, least: int = 1) -> Any:
    return lambda v: type(v) is int and least <= v <= most, f"a whole number in {least}..{most}"


def _triple(ok: Any, wanted: str) -> Any:
    def judge(value: Any) -> bool:
        numbers = isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value)
        return numbers and all(math.isfinite(v) and ok(v) for v in value)

    return judge, wanted


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(v) is int and 0 <= v <= 255 for v in value)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_share(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= 1)


def _are_classes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _are_exits(value: Any) -> bool:
    numbers = isinstance(value, list) and all(type(block) is int and 1 <= block <= MOST_ROWS for block in value)
    return numbers and all(block < later for block, later in pairwise(value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) in (int, float) and math.isfinite(v) for v in value)


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(k) and _is_text(v) for k, v in value.items())


TEXT = (_is_text, "text")
SHA = (_is_digest, "a SHA-256 of 64 hexadecimal digits")
SIDE = (lambda v: v is None or (type(v) is int and 1 <= v <= MOST_PIXELS), f"null or in 1..{MOST_PIXELS}")
# Name of an entry -> test of a value, and description of valid values.
ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("model", "blocks", "head", "data", "weights"), TEXT),
    "architecture": (lambda v: v is None or isinstance(v, dict), "null or names and values"),
    "classes": (_are_classes, "a list of different names"),
    "exits": (_are_exits, "an ascending list of blocks"),
    "precision": (lambda v: v in PRECISIONS, "one of " + ", ".join(PRECISIONS)),
    "batch_size": _whole(MOST_ROWS),
    "context": SIDE,
    **dict.fromkeys(("code_sha256", "weights_sha256"), (lambda v: v is None or _is_digest(v), "null or " + SHA[1])),
    **dict.fromkeys(("accuracy", "balanced_accuracy", "majority_share"), (_is_share, "null or in 0..1")),
    "task": (lambda v: v in TASKS, "one of " + ", ".join(TASKS)),
    **dict.fromkeys(("thresholds", "offset", "unit"), (_are_numbers, "a list of numbers")),
    "accuracy_on": (lambda v: v in ("test", "held-out"), "test or held-out"),
    "epochs": _whole(2**63, least=0),
    "steps": _whole(2**63, least=0),
    "parameter_digest": SHA,
    "sha256": SHA,
    "versions": (_are_versions, "names and versions"),
}
IMAGE_ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("height", "width"), _whole(LARGEST_DECODED)),
    **dict.fromkeys(("cropped_to", "enlarged_to"), SIDE),
    "mean": _triple(lambda v: True, "three numbers"),
    "std": _triple(lambda v: v > 0, "three positive numbers"),
    "reading": _whole(READING),
    "background": (_is_colour, "three whole numbers in 0..255"),
    "fit": (lambda v: v in FITS, "one of " + ", ".join(FITS)),
    "resample": (lambda v: v in RESAMPLES, "one of " + ", ".join(RESAMPLES)),
}


def checked(path: Path, tree: Mapping[str, Any], rules: Mapping[str, Any], *, within: str = "") -> dict[str, Any]:
    """Return the entries with rules. Raises RefusedError if one is missing or invalid."""
    for name, (ok, wanted) in rules.items():
        if name not in tree:
            raise RefusedError(f"{path} is damaged: it lacks {within}{name}")
        if not ok(tree[name]):
            raise RefusedError(f"{path} is damaged: {within}{name} ({str(tree[name])[:80]}) must be {wanted}")
    return {name: tree[name] for name in rules}


MIRRORED = ":mirrored"
HEADS = re.compile(
    rf"last|mlp(-[1-9][0-9]{{0,5}}(x[1-9][0-9]{{0,5}})*)?|(multi-level|kernel):[1-9][0-9]?(:class|:grid)?({MIRRORED})?"
)
"""Valid heads: `last` is the architecture's own, and `mlp-WxW...` an `Mlp` in its place. The others read every block at
P x P cells; of tokens they read the mean, or `:class` or `:grid` (see `config.head.TOKENS`). `multi-level:P` is
linear, `kernel:P` a `KernelHead`. With `:mirrored` the head averages over horizontal flips."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content, the preprocessing and the origin of a model file."""

    model: str
    """Architecture: a name of torchvision, timm:NAME, hf:PATH_OR_NAME, or package:function."""
    architecture: dict[str, Any] | None = None
    """Configuration of a model hf:..., which makes its folder unnecessary; None for others."""
    code_sha256: str | None = None
    """SHA-256 of the file of a custom model's function; None for others."""
    blocks: str
    """Scheme of the blocks."""
    head: str
    """Head, in the form of `HEADS`."""
    classes: tuple[str, ...]
    """Class names in the order of the logits."""
    image: Preparation | None
    """Preprocessing of images; None for a language model."""
    context: int | None = None
    """Context of a language model in characters; None for images."""
    precision: str
    """Precision of the evaluation: float32, or bfloat16 (autocast)."""
    batch_size: int
    """Batch size of the evaluation; other batch shapes may change the last bits."""
    data: str
    """Training dataset."""
    weights: str
    """Initial weights of the training: none, DEFAULT or a file."""
    weights_sha256: str | None
    """SHA-256 of the weight file at the start of the training; None without a file."""
    exits: tuple[int, ...] = ()
    """Blocks with a critic in front, see `hvfreeze.model.early_exits`; empty for most models."""
    task: str = "classes"
    """Task, a key of `tasks.TASKS`."""
    thresholds: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    unit: tuple[float, ...] = ()
    """Fields of the task; see `tasks.MultiLabel` and `tasks.Numbers`."""
    accuracy: float | None = 0.0
    """Accuracy of the final model, 0-1; None for numbers."""
    balanced_accuracy: float | None = None
    """Mean recall of all classes, 0-1; None for balanced classes."""
    majority_share: float | None = None
    """Share of the most frequent class among these samples, 0-1; None for balanced classes."""
    accuracy_on: str
    """Samples of the accuracy: `test`, or `held-out` from the training set."""
    epochs: int = 0
    steps: int = 0
    parameter_digest: str = ""
    """Digest of the parameters, as in summary.json."""
    sha256: str = ""
    """SHA-256 of the model file."""
    versions: dict[str, str]
    """Versions of the packages at training."""

    @property
    def answers(self) -> Task:
        """The model's task."""
        task = TASKS[self.task](len(self.classes), thresholds=self.thresholds)
        return replace(task, offset=self.offset, unit=self.unit) if isinstance(task, Numbers) else task

    def of_task(self, task: Task) -> Card:
        """Return the card with the thresholds and units of a run's task."""
        card = replace(self, task=task.kind, thresholds=task.thresholds)
        return replace(card, offset=task.offset, unit=task.unit) if isinstance(task, Numbers) else card

    @property
    def preparation(self) -> Preparation | TextPreparation:
        """Preprocessing of the model's inputs."""
        if self.image is not None:
            return self.image
        return TextPreparation(characters=self.classes, context=self.context or 1)

    @property
    def pool(self) -> int | None:
        """Cells per side of a head that reads every block; None for the architecture's own head."""
        parts = self.head.split(":")
        return int(parts[1]) if len(parts) > 1 else None

    @property
    def tokens(self) -> str:
        """Form of tokens for such a head."""
        return next((form for form in TOKENS if f":{form}" in self.head), "mean")

    @property
    def reads_mirrored(self) -> bool:
        """Whether the head averages over horizontal flips."""
        return self.head.endswith(MIRRORED)


def write_card(path: Path, card: Card) -> None:
    """Write a card."""
    # Copies of lists: YAML would write a repeated object as an alias.
    text = json.dumps(dataclasses.asdict(card), ensure_ascii=False)
    tree = {"card": FORMAT, **json.loads(text)}
    # PyYAML writes NEXT LINE unescaped but reads it as a line end, so a card with it is escaped.
    readable = "\x85" not in text
    publish(path, [yaml.safe_dump(tree, sort_keys=False, allow_unicode=readable, width=120).encode()])


def read_card(path: Path) -> Card:
    """Return the card in a file.

    Raises:
        RefusedError: the card is unreadable, damaged, or has an entry that this version does not know; names the entry.
    """
    try:
        tree = parse_plain_yaml(read_bytes(path), most_bytes=MOST_BYTES)
    except ValueError as error:
        raise RefusedError(f"{path} is damaged: {error}") from error
    if not isinstance(tree, dict) or "card" not in tree:
        raise RefusedError(f"{path} is damaged: it is not a model card")
    if tree["card"] != FORMAT:
        raise RefusedError(
            f"{path} is a card of format {tree['card']}, and this version of hvfreeze reads {FORMAT}; update hvfreeze"
        )
    if not HEADS.fullmatch(str(tree.get("head"))):
        raise RefusedError(
            f"{path}: head ({tree.get('head')}) is unknown to hvfreeze {__version__}, which supports "
            f"last, mlp-WxW..., multi-level:P and kernel:P"
        )
    image = tree.get("image")
    before: dict[str, Any] = {
        "architecture": None,
        "context": None,
        "exits": [],
        "balanced_accuracy": None,
        "majority_share": None,
    }
    before |= {"task": "classes", "thresholds": [], "offset": [], "unit": []}
    entries = checked(path, {**before, **tree}, ENTRIES)
    entries |= {name: tuple(entries[name]) for name in ("classes", "exits", "thresholds", "offset", "unit")}
    if any(len(entries[name]) not in (0, len(entries["classes"])) for name in ("thresholds", "offset", "unit")):
        raise RefusedError(
            f"{path} is damaged: thresholds, offset and unit must each have one number per class, or none"
        )
    if image is None and entries["context"] is not None:
        return Card(image=None, **entries)
    if not isinstance(image, dict):
        raise RefusedError(f"{path} is damaged: image ({image}) must have the entries of image preprocessing")
    # Cards without an entry for the reading are from versions with one way of reading.
    read = {"reading": 1, "background": [255, 255, 255], "fit": "crop", "resample": "bilinear"}
    prepared = checked(path, {**read, **image}, IMAGE_ENTRIES, within="image.")
    if (prepared["cropped_to"] or 1) > min(prepared["height"], prepared["width"]):
        raise RefusedError(f"{path} is damaged: image.cropped_to ({prepared['cropped_to']}) must fit into the image")
    if (pixels := prepared["height"] * prepared["width"]) > LARGEST_AREA:
        raise RefusedError(f"{path} is damaged: image.height x image.width ({pixels}) must be at most {LARGEST_AREA}")
    prepared |= {name: tuple(float(number) for number in prepared[name]) for name in ("mean", "std")}
    prepared["background"] = tuple(prepared["background"])
    return Card(image=Preparation(**prepared), **entries)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256, as hex."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
