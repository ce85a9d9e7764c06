"""A card as a file of plain YAML."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hvfreeze import __version__
from hvfreeze.applying.card.contents import HEADS, Card
from hvfreeze.applying.card.entries import ENTRIES, IMAGE_ENTRIES, checked
from hvfreeze.applying.preparation import Preparation
from hvfreeze.config.plain_yaml import MOST_BYTES, parse_plain_yaml
from hvfreeze.errors import RefusedError
from hvfreeze.runs.publishing import publish
from hvfreeze.runs.reading import read_bytes

FORMAT = 1
CHUNK = 2**20


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
            f"{path}: head ({tree.get('head')}) is not known to hvfreeze {__version__}, which knows last, "
            "multi-level:P and kernel:P"
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
