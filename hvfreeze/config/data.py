"""The settings of the data, and the parsers of their values. No torch."""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass
from typing import Annotated

from hvfreeze.config.section import Alternative, Count, Part, Section, setting
from hvfreeze.rules import Must, between, choice, float_or_nan, number_list, reads, rule
from hvfreeze.user_code import HF, check_named_code, is_named_code
from hvfreeze.wording import did_you_mean

Channels = tuple[float, float, float]
TEXT = "text"
DATA_SETS = ("digits", "cifar10", "cifar100", "imagefolder", TEXT)
TABLES = (".csv", ".tsv", ".parquet")
"""Suffixes of tables with the labels of images."""
MOST_PIXELS = 4096
"""Largest side of an image."""
CROPS = ("crop", "random-resized-crop")
RECIPES = (*CROPS, "trivial-augment", "color-jitter")
"""The parts of a --recipe, in the order in which they are applied."""
FITS = ("crop", "squash", "pad")
"""How an image that is not square becomes square."""
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters for resizing images, in Pillow's order."""
COLOURS = {"white": "255,255,255", "black": "0,0,0"}
MOST_VIEWS = 65536
"""A cached row's key has 16 bits for the view."""


def parse_views(text: str) -> tuple[str, int]:
    """Return the kind of an --augment value (fresh, none or views) and its number of augmented views per sample.

    `fresh` has 0, for a new view every epoch; `none` has 1.

    Raises:
        UsageError: it is not `fresh`, `none` or `views:K` with K from 1 to 65536.
    """
    if text in ("fresh", "none"):
        return text, int(text == "none")
    found = re.fullmatch(r"views:([1-9][0-9]{0,4})", text)
    number = int(found.group(1)) if found else 0
    rule(1 <= number <= MOST_VIEWS, "augment", text, f"fresh, none or views:K with K in 1..{MOST_VIEWS}")
    return "views", number


def parse_recipe(text: str) -> tuple[str, ...]:
    """Return the parts of a --recipe value: first the crop, then the changes of colours.

    Raises:
        UsageError: a part is not in `RECIPES`, there is a part twice, or there are two crops.
    """
    parts = text.split(",")
    rule(set(parts) <= set(RECIPES), "recipe", text, "a list out of " + ", ".join(RECIPES))
    crops = [part for part in parts if part in CROPS]
    rule(
        len(set(parts)) == len(parts) and len(crops) < 2,
        "recipe",
        text,
        "parts that differ, at most one of them a crop",
    )
    return (*(crops or CROPS[:1]), *(part for part in RECIPES if part in parts and part not in CROPS))


def parse_channels(flag: str, text: str) -> tuple[float, float, float]:
    """Return a number for each of the three channels from `text`: one for all, or three separated by commas.

    Raises:
        UsageError: it is neither.
    """
    numbers = [float_or_nan(entry) for entry in text.split(",")]
    ok = len(numbers) in (1, 3) and all(math.isfinite(number) for number in numbers)
    rule(ok, flag, text, "a number, or one for each of red, green and blue, as in 0.5,0.5,0.5")
    red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    return red, green, blue


def is_table(text: str) -> bool:
    """Return True if a text is the path of a table."""
    return text.lower().endswith(TABLES)


def absolute_data(data: str) -> str:
    """Return --data, whose path is absolute if it names a table, or a data set of Hugging Face's library."""
    if data.startswith(HF):
        return HF + os.path.abspath(data.removeprefix(HF))
    return os.path.abspath(data) if is_table(data) else data


def parse_colour(text: str) -> tuple[int, int, int]:
    """Return red, green and blue, 0 to 255, of a colour: `white`, `black`, or three numbers separated by commas.

    Raises:
        UsageError: it is neither.
    """
    numbers = [float_or_nan(entry) for entry in COLOURS.get(text, text).split(",")]
    ok = len(numbers) == 3 and all(number in range(256) for number in numbers)
    rule(ok, "background", text, "white, black, or red, green and blue in 0..255, as in 128,128,128")
    red, green, blue = map(int, numbers)
    return red, green, blue


def check_data(text: str) -> None:
    """Raise UsageError unless `text` names a data set."""
    if is_named_code(text):
        check_named_code("data", text)
    elif not is_table(text) and not (text.startswith(HF) and text != HF):
        way = f"for a folder of images: --data imagefolder --data-dir {shlex.quote(text)}"
        wanted = f"one of {', '.join(DATA_SETS)}, a table ({', '.join(TABLES)}), hf:PATH or package:function"
        rule(text in DATA_SETS, "data", text, wanted, did_you_mean(text, DATA_SETS).removeprefix("; ") or way)


def check_shard_sizes(text: str) -> None:
    """Raise UsageError unless `text` is `equal` or one relative size per rank."""
    ok = text == "equal" or all(0 < size < math.inf for size in number_list("shard-sizes", text))
    rule(ok, "shard-sizes", text, "equal, or one positive, finite number per rank")


def parse_dirichlet(text: str) -> float | None:
    """Return A of a --partition value `dirichlet:A`, None for `iid`.

    Raises:
        UsageError: it is neither, or A is not in (0, 1e9]; above, shares are equal and sums overflow.
    """
    if text == "iid":
        return None
    kind, _, number = text.partition(":")
    alpha = float_or_nan(number) if kind == "dirichlet" else math.nan
    wanted = "iid, or dirichlet:A with A > 0 and at most 1e9, such as dirichlet:0.5"
    rule(0 < alpha <= 1e9, "partition", text, wanted)
    return alpha


IMAGES = Alternative("--data of images", lambda config: config.data.data != TEXT)
TABLE = Alternative("--data of a table", lambda config: is_table(config.data.data))
COLUMNS = Alternative(
    "--data of a table, or hf:PATH", lambda config: is_table(config.data.data) or config.data.data.startswith(HF)
)
FILES = Alternative("another --data than digits", lambda config: config.data.data != "digits")
WINDOWS = Alternative(f"--data {TEXT}", lambda config: config.data.data == TEXT)
SIZED = Alternative("--image-size PIXELS", lambda config: config.data.image_size is not None)
HELD_OUT = Alternative("--validation-fraction F, such as 0.1", lambda config: config.data.validation_fraction > 0)
FLIPPED = Alternative(
    "--augment fresh or views:K, or --head-fit exact or kernel",
    lambda config: config.data.augment != "none" or config.head.solved,
)
DRAWN = Alternative("--augment fresh or views:K", lambda config: config.data.augment != "none")
Partition = Annotated[str, reads(parse_dirichlet)]
Sizes = Annotated[str, reads(check_shard_sizes)]
Table = Annotated[str, Must(is_table, "a table, as --data")]
NotEmpty = Annotated[str, Must(bool, "a text, and not empty")]
Window = Annotated[int, between(2, 4096)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The samples, their split between ranks, and their augmentation."""

    data: Annotated[str, reads(check_data)] = setting(
        "digits",
        "NAME",
        "digits, cifar10, cifar100, imagefolder, text, a table (.csv, .tsv, .parquet) with a row for each image, "
        "hf:PATH (a data set of Hugging Face's library on disk), or package:function",
    )
    data_dir: Annotated[str, Must(bool, "a path, and not empty")] | None = setting(
        None,
        "DIR",
        "folder of the data; default: $HVFREEZE_DATA or a cache directory, for a table's images the table's folder; "
        "imagefolder needs it; with --data text a file, default: the sources of Python's standard library",
        brief="folder of built-in data, or of a table's images",
        of=FILES,
    )
    context: Window = setting(64, "N", "characters per window", of=WINDOWS)
    task: Annotated[str, choice("auto", "classes", "labels", "numbers")] = setting(
        "auto",
        "WHAT",
        "kind of labels: classes (one per sample), labels (several per sample), numbers (regression), or auto "
        "(detected)",
        brief="classes, labels (several each), numbers",
        of=IMAGES,
    )
    image_column: str | None = setting(
        None, "NAME", "the column with the images, or their paths; default: image, path and the like", of=COLUMNS
    )
    label_column: str | None = setting(
        None,
        "NAME,...",
        "the column with the labels; several columns have one label or number each; default: label, class and the like",
        brief="of a table: the column with the labels",
        of=COLUMNS,
    )
    label_delimiter: NotEmpty | None = setting(
        None, "TEXT", "between the labels in one cell, as in 'cat,dog'; default with --task labels: a comma", of=TABLE
    )
    split_column: str | None = setting(
        None,
        "NAME",
        "the column with train, val or test; none: a tenth is held out; default: split, subset and the like",
        of=TABLE,
    )
    weight_column: str | None = setting(
        None,
        "NAME",
        "the column with the weight of each training image in the loss, 0 leaves it out; none: equal weights; default: "
        "sample_weight",
        of=COLUMNS,
    )
    test_table: Table | None = setting(None, "FILE", "a table with the test samples, with the same columns", of=TABLE)
    train_samples: Count | None = setting(
        None, "N", "train on a stratified subset of N samples", brief="number of training samples [all]"
    )
    validation_fraction: Part = setting(
        0.0,
        "F",
        "hold out this share of the training set and evaluate on it only",
        brief="evaluate on this share of the training images",
    )
    image_size: Annotated[int, between(1, MOST_PIXELS)] | None = setting(
        None,
        "PIXELS",
        "side of the square images, see --fit; default: the size of the images, or 128 for a folder of images that "
        "differ in size; with --model hf:... the size in its image processor",
        brief="side in pixels; default: as is, or 128 if unequal",
        of=IMAGES,
    )
    fit: Annotated[str, choice(*FITS)] = setting(
        "crop",
        "HOW",
        "how images become square: crop (the centre square), squash (each side scaled separately) or pad (a border in "
        "the colour --background)",
        of=(IMAGES, SIZED),
    )
    background: Annotated[str, reads(parse_colour)] = setting(
        "white",
        "COLOUR",
        "colour behind transparent parts of images and around padded images: white, black, or R,G,B in 0..255",
        of=IMAGES,
    )
    resize: int | None = setting(
        None,
        "PIXELS",
        "resize to this first; training crops --image-size out of it, evaluation takes the centre",
        of=(IMAGES, SIZED),
    )
    resample: Annotated[str, choice(*RESAMPLES)] = setting(
        "bilinear", "FILTER", "how files of images are resized: " + ", ".join(RESAMPLES), of=IMAGES
    )
    mean: str | None = setting(
        None,
        "M",
        "normalise with this mean, one for all channels or three; default: that of the weights or the built-in dataset",
        of=IMAGES,
    )
    std: str | None = setting(
        None, "S", "normalise with this standard deviation, given together with --mean", of=IMAGES
    )
    data_seed: int | None = setting(None, "SEED", "seed of subset, shards, order and views; default: --seed")
    shuffle: Annotated[str, choice("shard", "global")] = setting(
        "shard", "HOW", "shard (fixed shards, shuffled inside) or global (new shards each epoch)"
    )
    partition: Partition = setting("iid", "HOW", "iid, or dirichlet:A for label skew between ranks", of=IMAGES)
    shard_sizes: Sizes = setting("equal", "HOW", "equal, or one relative size per rank, as in 3,1,1,1")
    skip_bad: bool = setting(
        False,
        "",
        "leave out images that cannot be decoded; all images are checked before the start",
        brief="leave out images that cannot be decoded",
        of=IMAGES,
    )
    augment: Annotated[str, reads(parse_views)] = setting(
        "fresh",
        "HOW",
        "fresh (new draws every epoch), none, or views:K (K fixed views of each sample)",
    )
    flips: Annotated[str, choice("auto", "on", "mean", "off")] = setting(
        "auto",
        "WHETHER",
        "horizontal flips in the augmented views, and in the rows of a fitted head: on (unless the data set rules them "
        "out), mean (a fitted head reads the mean features of an image and its flip; inference takes twice as long), "
        "auto (on; with more than 25,000 samples in hvfreeze auto mean; off if training samples show that left and "
        "right matter) or off",
        brief="horizontal: auto (tested), on, off, mean",
        of=(IMAGES, FLIPPED),
    )
    recipe: Annotated[str, reads(parse_recipe)] = setting(
        "crop",
        "LIST",
        "augmentations: crop (with a black border) or random-resized-crop, with trivial-augment, color-jitter",
        of=(IMAGES, DRAWN),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule(self.data != "imagefolder" or bool(self.data_dir), "data", self.data, "given together with --data-dir DIR")
        larger = self.resize is None or (self.image_size or 1) <= self.resize <= MOST_PIXELS
        rule(larger, "resize", self.resize, f"at least --image-size ({self.image_size}) and at most {MOST_PIXELS}")
        self.statistics()
        text, alone = self.data == TEXT, self.validation_fraction == 0 or self.augment == "none"
        why = "other views of a window overlap the held-out windows"
        rule(not text or alone, "augment", self.augment, "none with --data text and --validation-fraction", why)

    @property
    def stored_size(self) -> int | None:
        """Side of the square images after decoding, in pixels; None keeps their size."""
        return self.resize or self.image_size

    def background_colour(self) -> tuple[int, int, int]:
        """Return red, green and blue of --background, 0 to 255."""
        return parse_colour(self.background)

    def statistics(self) -> tuple[Channels, Channels] | None:
        """Return the given mean and standard deviation of each channel; None if they were not given."""
        if self.mean is None and self.std is None:
            return None
        (lone, value), other = (("mean", self.mean), "std") if self.std is None else (("std", self.std), "mean")
        rule(self.mean is not None and self.std is not None, lone, value, f"given together with --{other}")
        mean, std = parse_channels("mean", self.mean or ""), parse_channels("std", self.std or "")
        rule(all(number > 0 for number in std), "std", self.std, "above 0")
        return mean, std

    def mirrors(self, flips: bool) -> bool:
        """Return True if training uses horizontal flips; `flips` is True if they keep the class in this data set."""
        return flips and self.flips != "off"

    def cacheable(self) -> bool:
        """Return True if the view of a sample can repeat, so that its activations are worth storing."""
        return self.augment != "fresh"
