"""How a setting is declared and checked, and the only parsers of the little languages that some of them hold."""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from hvfreeze.errors import UsageError
from hvfreeze.user_code import HF

CROPS = ("crop", "random-resized-crop")
RECIPES = (*CROPS, "trivial-augment", "color-jitter")
"""The parts of a --recipe, in the order in which they are applied."""
FITS = ("crop", "squash", "pad")
"""How an image that is not square becomes one."""
TOKENS = ("mean", "class", "grid")
"""What a multi-level head takes of a block that gives tokens: their mean, the class token, or patches in a grid."""
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters by which images are resized, in Pillow's order."""
COLOURS = {"white": "255,255,255", "black": "0,0,0"}
MOST_VIEWS = 65536
"""A cached row's key leaves 16 bits to the view."""


types_of = cache(typing.get_type_hints)
"""The types of a class's attributes by name. They check every configuration, and to evaluate them takes longest."""


class Must(NamedTuple):
    """A bound in the type of a setting, such as `Annotated[int, at_least(1)]`: a test of its value, and what to say."""

    holds: Callable[[Any], bool]
    wanted: str


def choice(*names: str) -> Must:
    """Return the bound that a value is one of `names`."""
    return Must(lambda value: value in names, "one of " + ", ".join(names))


def at_least(least: int, unit: str = "") -> Must:
    """Return the bound that a value is `least` or more of a unit."""
    return Must(lambda value: value >= least, f"{f'at least {least}' if least else '0 or more'} {unit}".rstrip())


def between(least: int, most: int) -> Must:
    """Return the bound that a value is from `least` to `most`."""
    return Must(lambda value: least <= value <= most, f"in {least}..{most}")


def typed(leaf: str, value: Any, kind: Any, *, source: str) -> Any:
    """Return `value` as the leaf's type; numbers are accepted where text is wanted (lists of weights, counts).

    Paths are text, and the scalars of numpy and torch numbers. Where no text is wanted, on and off are booleans, and a
    text such as 1e-3 is a number.

    Raises:
        UsageError: `value` has another type.
    """
    options = typing.get_args(kind) or (kind,)
    if value is None and type(None) in options:
        return None
    plain = value
    with suppress(TypeError, ValueError, RuntimeError):
        plain = value.item() if hasattr(value, "item") else os.fspath(value)
    if float in options and isinstance(plain, int) and not isinstance(plain, bool):
        # A number that no float holds is judged as one that is infinite.
        return float(plain) if abs(plain) < 2**1023 else math.inf * (1 if plain > 0 else -1)
    if type(plain) is str and str not in options:
        # What YAML has for text, though it is written as for a flag.
        if int in options and re.fullmatch(r"[-+]?0[0-9]+", plain):
            return int(plain)
        if bool in options and plain.lower() in ("on", "off"):
            return plain.lower() == "on"
        if float in options and re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+", plain):
            return float(plain)
    if str in options and not isinstance(plain, bool):
        if isinstance(plain, (list, tuple)) and all(isinstance(entry, (int, float, str)) for entry in plain):
            return ",".join(str(entry) for entry in plain)
        if isinstance(plain, (int, float)):
            return str(plain)
    if type(plain) is str and str in options and "\0" in plain:
        raise UsageError(f"{source}: {leaf} ({value!r}) must be text without NUL characters, which no path may have")
    for option in options:
        if type(plain) is option:
            return plain
    names = " or ".join(option.__name__ for option in options if option is not type(None))
    quotes = f"; put {leaf} in quotes where it is text such as yes" if str in options and type(plain) is bool else ""
    raise UsageError(f"{source}: {leaf} ({value!r}) must be of type {names}{quotes}")


def rule(ok: bool, flag: str, value: object, wanted: str, remedy: str = "") -> None:
    """Raise UsageError naming the flag, its value, the rule and the way out unless `ok`."""
    if not ok:
        raise UsageError(f"--{flag} ({value}) must be {wanted}" + (f"; {remedy}" if remedy else ""))


def check_bounds(leaf: str, value: object, kind: Any) -> None:
    """Raise UsageError unless `value` is None or within the bounds of the leaf's type `kind`, which may be optional."""
    bounds = [must for option in (kind, *typing.get_args(kind)) for must in getattr(option, "__metadata__", ())]
    for must in bounds:
        rule(value is None or must.holds(value), leaf.replace("_", "-"), value, must.wanted)


def one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    rule(value in choices, flag, value, "one of " + ", ".join(choices))


def float_or_nan(text: str) -> float:
    """Return `text` as a number, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_list(flag: str, text: str, *, also: str = "") -> list[float]:
    """Return the numbers in `text`, which commas separate.

    Raises:
        UsageError: an entry is no number.
    """
    numbers = [float_or_nan(entry) for entry in text.split(",")]
    wanted = (also + ", or " if also else "") + "numbers separated by commas, one per rank"
    rule(not any(math.isnan(n) for n in numbers), flag, text, wanted)
    return numbers


def parse_views(text: str) -> tuple[str, int]:
    """Return the kind of an --augment value (fresh, none or views) and how many views of a sample there are.

    `fresh` has 0, which stands for a new one every epoch; `none` has 1.

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
    """Return the parts of a --recipe value: first how a view is cropped, then what is done to its colours.

    Raises:
        UsageError: a part is none of `RECIPES`, comes twice, or views are to be cropped in two ways.
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


MLP_WIDTHS = (512, 512)
"""Of an `mlp` without numbers."""


def parse_mlp(flag: str, text: str) -> tuple[int, ...] | None:
    """Return the neurons of each hidden layer in `mlp` or `mlp-WxW...`, None for a text that begins otherwise.

    Raises:
        UsageError: it begins so, and is neither.
    """
    if text != "mlp" and not text.startswith("mlp-"):
        return None
    if text == "mlp":
        return MLP_WIDTHS
    found = re.fullmatch(r"mlp((?:[-x][1-9][0-9]{0,5})+)", text.replace("-", "x"))
    wanted = "mlp, or mlp-WxW... with the neurons of each hidden layer, as in mlp-2048 or mlp-512x512"
    rule(found is not None and text.count("-") == 1, flag, text, wanted)
    return tuple(int(width) for width in text.removeprefix("mlp-").split("x"))


def parse_channels(flag: str, text: str) -> tuple[float, float, float]:
    """Return a number for each of three channels from `text`: one for all, or three with commas between.

    Raises:
        UsageError: it is neither.
    """
    numbers = [float_or_nan(entry) for entry in text.split(",")]
    ok = len(numbers) in (1, 3) and all(math.isfinite(number) for number in numbers)
    rule(ok, flag, text, "a number, or one for each of red, green and blue, as in 0.5,0.5,0.5")
    red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    return red, green, blue


TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Names of experiment trackers, which are those of their libraries."""


def parse_class_weights(text: str) -> str | dict[str, float] | None:
    """Return None for `none`, `balanced`, or weights by the names of classes, as in `cat=2,dog=0.5`.

    Raises:
        UsageError: it is neither, or names a class twice.
    """
    if text in ("none", "balanced"):
        return None if text == "none" else text
    pairs = [entry.rpartition("=")[::2] for entry in text.split(",")]
    weights = {name: float_or_nan(number) for name, number in pairs}
    ok = all(name and 0 < weight < math.inf for name, weight in weights.items())
    wanted = "none, balanced, or NAME=W,NAME=W,... with weights above 0, as in cat=2,dog=0.5"
    rule(ok and len(weights) == len(pairs), "class-weights", text, wanted)
    return weights


TABLES = (".csv", ".tsv", ".parquet")
"""Suffixes of tables with the labels of images."""


def is_table(text: str) -> bool:
    """Return True if a text is the path of a table."""
    return text.lower().endswith(TABLES)


def absolute_data(data: str) -> str:
    """Return --data, whose path is absolute if it names a table, or a data set of Hugging Face's library."""
    if data.startswith(HF):
        return HF + os.path.abspath(data.removeprefix(HF))
    return os.path.abspath(data) if is_table(data) else data


def is_url(text: str) -> bool:
    """Tell whether a text is a URL."""
    return re.match(r"(https?|file)://", text) is not None


def weights_entry(text: str) -> tuple[str, str] | None:
    """Return the enumeration, perhaps empty, and the name in ResNet18_Weights.IMAGENET1K_V1, DEFAULT and the like.

    None for a text of another form: the path of a file, or a URL.
    """
    found = re.fullmatch(r"(?:(\w+_Weights)\.)?(DEFAULT|IMAGENET1K_\w+)", text)
    return (found[1] or "", found[2]) if found else None


def is_downloaded(weights: str) -> bool:
    """Tell whether --weights names what is downloaded, and no file."""
    return is_url(weights) or weights_entry(weights) is not None


def parse_colour(flag: str, text: str) -> tuple[int, int, int]:
    """Return red, green and blue, 0 to 255, of a colour: `white`, `black`, or three numbers with commas between.

    Raises:
        UsageError: it is neither.
    """
    numbers = [float_or_nan(entry) for entry in COLOURS.get(text, text).split(",")]
    ok = len(numbers) == 3 and all(number in range(256) for number in numbers)
    rule(ok, flag, text, "white, black, or red, green and blue in 0..255, as in 128,128,128")
    red, green, blue = map(int, numbers)
    return red, green, blue


def parse_dirichlet(text: str) -> float | None:
    """Return A of a --partition value `dirichlet:A`, None for `iid`.

    Raises:
        UsageError: it is neither, or A is not in (0, 1e9], beyond which shares are equal and sums overflow.
    """
    if text == "iid":
        return None
    kind, _, number = text.partition(":")
    alpha = float_or_nan(number) if kind == "dirichlet" else math.nan
    wanted = "iid, or dirichlet:A with A > 0 and at most 1e9, such as dirichlet:0.5"
    rule(0 < alpha <= 1e9, "partition", text, wanted)
    return alpha


def parse_bytes(text: str) -> int | None:
    """Return the bytes in a size such as `500M` or `20G` (K, M, G, T are powers of 1024), None for `none`.

    Raises:
        UsageError: it is no such size, or larger than any disk.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGT]?)i?B?", text)
    rule(found is not None, "cache-limit", text, "none or a size such as 500M or 20G")
    assert found is not None
    return int(float(found.group(1)) * 1024 ** " KMGT".index(found.group(2) or " "))


def parse_parts(flag: str, text: str, choices: tuple[str, ...]) -> frozenset[str]:
    """Return the names in `text`, which commas separate; none for `none`.

    Raises:
        UsageError: one is not among `choices`.
    """
    names = frozenset() if text == "none" else frozenset(text.split(","))
    rule(names <= set(choices), flag, text, "none or a list out of " + ", ".join(choices))
    return names


def parse_cadence(text: str) -> tuple[int, str]:
    """Return how often something is done and its unit, `epochs`, or `steps` for a number with the suffix s.

    Raises:
        UsageError: it is neither `N` nor `Ns`.
    """
    found = re.fullmatch(r"([0-9]{1,18})(s?)", text)
    rule(found is not None, "checkpoint-every", text, "auto, a number of epochs, or of steps with the suffix s")
    assert found is not None
    return int(found.group(1)), "steps" if found.group(2) else "epochs"


def parse_duration(text: str) -> float | None:
    """Return the seconds in a time such as `90s`, `10m` or `1h30m`, None for `none`.

    Raises:
        UsageError: it is no such time, or 0.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?", text)
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    rule(total > 0, "time-budget", text, "none or a time above 0 such as 90s, 10m or 1h30m")
    return float(total)


def parse_compression(text: str) -> tuple[str, int]:
    """Return the kind of a --compression value (none, fp16, powersgd or auto), and powersgd's rank, 0 for the others.

    Raises:
        UsageError: it is neither `none`, `fp16`, `auto` nor `powersgd:R` with R from 1 to 256.
    """
    if text in ("none", "fp16", "auto"):
        return text, 0
    found = re.fullmatch(r"powersgd:([1-9][0-9]{0,2})", text)
    rank = int(found.group(1)) if found else 0
    rule(1 <= rank <= 256, "compression", text, "none, fp16, auto, or powersgd:R with R in 1..256, such as powersgd:4")
    return "powersgd", rank
