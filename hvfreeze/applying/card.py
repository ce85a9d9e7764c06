"""A model's card, the file `model.yaml` beside `model.pt`: all that one must know to apply the model. Plain YAML."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvfreeze import __version__
from hvfreeze.applying.preparation import Preparation
from hvfreeze.chain.origins.weights import weights_path
from hvfreeze.config.model import HeadConfig, ModelConfig
from hvfreeze.config.plain_yaml import MOST_BYTES, parse_plain_yaml
from hvfreeze.config.sections import DataConfig
from hvfreeze.data.dealing import Corpus
from hvfreeze.data.views.transform import Transform
from hvfreeze.errors import RefusedError
from hvfreeze.named_code import TIMM, code_sha256, is_named_code
from hvfreeze.runs.environment import version_of
from hvfreeze.runs.publishing import publish
from hvfreeze.runs.reading import read_bytes

FORMAT = 1
HEADS = re.compile(r"last|multi-level:[1-9][0-9]?")
"""Heads that a model can have: `last` is the architecture's own; `multi-level:P` reads every block, at P x P cells."""
LIBRARIES = ("torch", "torchvision", "pillow")
PRECISIONS = ("float32", "bfloat16")
LARGEST = 4096
MOST_ROWS = 2**20
CHUNK = 2**20


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model file holds, how it is applied, and what it came from."""

    model: str
    """The architecture: its name in torchvision, timm:NAME, or package:function."""
    code_sha256: str | None = None
    """Of the file of that function; None where it is none."""
    blocks: str
    """The scheme by which it was cut."""
    head: str
    """As in `HEADS`."""
    classes: tuple[str, ...]
    """In the order of the logits."""
    image: Preparation
    precision: str
    """In which it was evaluated: float32, or bfloat16 (autocast)."""
    batch_size: int
    """Rows of a batch when it was evaluated; batches of other shapes may give other last bits."""
    data: str
    """The data set that it was trained on."""
    weights: str
    """What training started from: none, DEFAULT or a file."""
    weights_sha256: str | None
    """Of that file, when training started; None where there was none."""
    accuracy: float = 0.0
    """Of the final model, 0-1."""
    accuracy_on: str
    """`test`, or `held-out` for a part of the training set."""
    epochs: int = 0
    steps: int = 0
    parameter_digest: str = ""
    """summary.json's."""
    sha256: str = ""
    """Of the model file."""
    versions: dict[str, str]
    """Of what trained it."""


def describe(
    model: ModelConfig,
    head: HeadConfig,
    data: DataConfig,
    corpus: Corpus,
    transform: Transform,
    *,
    precision: str,
    batch_size: int,
    hashed: bool,
) -> Card:
    """Return the card of a run that has not ended; `hashed` tells whether to read the weights' file for its digest."""
    _, height, width = corpus.train.image_shape
    side, square = transform.image_size, (height,) if height == width else ()
    path = weights_path(model.model, model.weights) if hashed else None
    library = ("timm",) if model.model.startswith(TIMM) else ()
    return Card(
        model=model.model,
        code_sha256=code_sha256("model", model.model) if is_named_code(model.model) else None,
        blocks=model.blocks,
        head=head_named(head),
        classes=corpus.train.classes,
        image=Preparation(
            height=height,
            width=width,
            cropped_to=transform.cropped_to,
            enlarged_to=None if side in (transform.cropped_to, *square) else side,
            mean=transform.mean,
            std=transform.std,
        ),
        precision=precision,
        batch_size=batch_size,
        data=data.data,
        weights=model.weights,
        weights_sha256=sha256_of(path) if path else None,
        accuracy_on="held-out" if data.validation_fraction > 0 else "test",
        versions={"hvfreeze": __version__, **{name: version_of(name) or "unknown" for name in (*LIBRARIES, *library)}},
    )


def head_named(settings: HeadConfig) -> str:
    """Return the head that settings ask for, as in `HEADS`."""
    return "last" if settings.head == "last" else f"{settings.head}:{settings.pool}"


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256, as hex.

    Raises:
        RefusedError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                digest.update(part)
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def write_card(path: Path, card: Card) -> None:
    """Publish a card.

    Raises:
        RefusedError: it cannot be written.
    """
    # Lists made anew: YAML would write the second of two equal objects as an alias.
    tree = {"card": FORMAT, **plain(dataclasses.asdict(card))}
    publish(path, [yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120).encode()])


def plain(value: Any) -> Any:
    """Return a tree of dicts and lists that shares no list."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def read_card(path: Path) -> Card:
    """Return the card in a file.

    Raises:
        RefusedError: it cannot be read, is damaged, or tells of what this version does not know; names the entry.
    """
    try:
        tree = parse_plain_yaml(read_bytes(path)[: MOST_BYTES + 1])
    except ValueError as error:
        raise RefusedError(f"{path} is damaged: {error}") from error
    if not isinstance(tree, dict) or "card" not in tree:
        raise RefusedError(f"{path} is damaged: it is no model card")
    if tree["card"] != FORMAT:
        raise RefusedError(f"{path} is a card of format {tree['card']}, and this version reads {FORMAT}; update it")
    if not HEADS.fullmatch(str(tree.get("head"))):
        raise RefusedError(
            f"{path}: head ({tree.get('head')}) is not known to hvfreeze {__version__}, which knows last and "
            "multi-level:P"
        )
    image = tree.get("image")
    if not isinstance(image, dict):
        raise RefusedError(f"{path} is damaged: image ({image}) must be how images are prepared")
    entries = checked(path, tree, ENTRIES)
    prepared = checked(path, image, IMAGE_ENTRIES, within="image.")
    if (prepared["cropped_to"] or 1) > min(prepared["height"], prepared["width"]):
        raise RefusedError(f"{path} is damaged: image.cropped_to ({prepared['cropped_to']}) must fit into the image")
    prepared |= {name: tuple(float(number) for number in prepared[name]) for name in ("mean", "std")}
    entries["classes"] = tuple(entries["classes"])
    return Card(image=Preparation(**prepared), **entries)


def pool_of(card: Card) -> int | None:
    """Return the cells a side of a multi-level head, None for the architecture's own."""
    kind, _, pool = card.head.partition(":")
    return int(pool) if kind == "multi-level" else None


def whole(most: int, *, least: int = 1) -> Any:
    """Return the rule of a whole number."""
    return lambda v: type(v) is int and least <= v <= most, f"a whole number in {least}..{most}"


def triple(ok: Any, wanted: str) -> Any:
    """Return the rule of a number per channel."""

    def judge(value: Any) -> bool:
        numbers = isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value)
        return numbers and all(math.isfinite(v) and ok(v) for v in value)

    return judge, wanted


def is_text(value: Any) -> bool:
    """Tell whether a value is text that says something."""
    return isinstance(value, str) and bool(value)


def is_digest(value: Any) -> bool:
    """Tell whether a value is a SHA-256 as hex."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def are_classes(value: Any) -> bool:
    """Tell whether a value is a list of different names."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value)) and len(set(value)) == len(value)


def are_versions(value: Any) -> bool:
    """Tell whether a value is names with texts."""
    return isinstance(value, dict) and all(is_text(k) and is_text(v) for k, v in value.items())


TEXT = (is_text, "text")
SHA = (is_digest, "a SHA-256 of 64 hexadecimal digits")
SIDE = (lambda v: v is None or (type(v) is int and 1 <= v <= LARGEST), f"null or in 1..{LARGEST}")
ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("model", "blocks", "head", "data", "weights"), TEXT),
    "classes": (are_classes, "a list of different names"),
    "precision": (lambda v: v in PRECISIONS, "one of " + ", ".join(PRECISIONS)),
    "batch_size": whole(MOST_ROWS),
    **dict.fromkeys(("code_sha256", "weights_sha256"), (lambda v: v is None or is_digest(v), "null or " + SHA[1])),
    "accuracy": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "in 0..1"),
    "accuracy_on": (lambda v: v in ("test", "held-out"), "test or held-out"),
    "epochs": whole(2**63, least=0),
    "steps": whole(2**63, least=0),
    "parameter_digest": SHA,
    "sha256": SHA,
    "versions": (are_versions, "names and versions"),
}
IMAGE_ENTRIES: dict[str, Any] = {
    "height": whole(LARGEST),
    "width": whole(LARGEST),
    **dict.fromkeys(("cropped_to", "enlarged_to"), SIDE),
    "mean": triple(lambda v: True, "three numbers"),
    "std": triple(lambda v: v > 0, "three positive numbers"),
}


def checked(path: Path, tree: Mapping[str, Any], rules: Mapping[str, Any], *, within: str = "") -> dict[str, Any]:
    """Return the entries that have rules; raise RefusedError where one is missing or breaks its own."""
    for name, (ok, wanted) in rules.items():
        if name not in tree:
            raise RefusedError(f"{path} is damaged: it lacks {within}{name}")
        if not ok(tree[name]):
            raise RefusedError(f"{path} is damaged: {within}{name} ({str(tree[name])[:80]}) must be {wanted}")
    return {name: tree[name] for name in rules}
