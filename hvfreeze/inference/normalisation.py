"""How a run normalises images: as it was told, as the weights were trained, or by the data's own values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hvfreeze.config.tree import Config
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.views import Statistics
from hvfreeze.errors import RefusedError
from hvfreeze.inference.card import read_card, sha256_of
from hvfreeze.model.hugging_face import read_statistics
from hvfreeze.model.model_sources import timm_statistics
from hvfreeze.model.settings import ModelConfig, is_downloaded
from hvfreeze.model.weight_names import entry_of_file, find_entry
from hvfreeze.model.weights import statistics_of_entry
from hvfreeze.user_code import HF, TIMM


@dataclass(frozen=True)
class Normalisation:
    """The mean and standard deviation of each channel with which images are normalised, and where they come from."""

    statistics: Statistics
    source: str

    def describe(self) -> str:
        """Return a note for the user."""
        mean, std = (", ".join(f"{number:.4g}" for number in numbers) for numbers in self.statistics)
        return f"images are normalised with mean {mean} and standard deviation {std}: {self.source}"


def normalisation_of(config: Config, image_set: ImageSet, model: nn.Module | None) -> Normalisation:
    """Return how a run normalises images: as it was told, as the weights were trained, or by the data's own values."""
    given = config.data.statistics()
    if given is not None:
        return Normalisation(given, "--mean and --std")
    known = trained_with(config.model, model)
    if known is not None:
        return known
    name = image_set.name
    source = f"those of {name}" if name in MEASURED else "ImageNet's, for want of others"
    configured = configured_in(model)
    if configured is not None and configured != (image_set.mean, image_set.std):
        mean, std = (",".join(f"{number:.4g}" for number in numbers) for numbers in configured)
        source += f"; the model's configuration has --mean {mean} --std {std}, in case it comes with trained weights"
    return Normalisation((image_set.mean, image_set.std), source)


def trained_with(settings: ModelConfig, model: nn.Module | None) -> Normalisation | None:
    """Return the mean and standard deviation that images had when the weights were trained, None where nobody says.

    In this order: the card that a run leaves beside its model, torchvision of its own weights, the configuration that
    comes with a file of a hub, and what timm or an image processor says of the model, or the model of itself.
    """
    if settings.weights == "none":
        return None
    entry = find_entry(settings.model, settings.weights)
    if entry is None and not is_downloaded(settings.weights):
        path = Path(os.path.expanduser(settings.weights))
        with suppress(RefusedError):
            card = read_card(path.with_suffix(".yaml"))
            if card.image is not None and card.sha256 == sha256_of(path):
                return Normalisation((card.image.mean, card.image.std), f"those of the run that made {path}")
        configured = configured_beside(path)
        if configured is not None:
            return Normalisation(configured, f"those in {path.with_name(HUB_CONFIGURATION)}")
        entry = entry_of_file(settings.model, path)
    if entry is not None:
        return Normalisation(statistics_of_entry(entry), f"torchvision's for {entry}")
    if settings.model.startswith(TIMM):
        known = timm_statistics(settings.model)
        return known and Normalisation(known, f"timm's for {settings.model.removeprefix(TIMM)}")
    if settings.model.startswith(HF):
        known = read_statistics(settings.model)
        return known and Normalisation(known, f"the image processor's of {settings.model}")
    known = configured_in(model)
    return known and Normalisation(known, f"those in the configuration of {settings.model}")


HUB_CONFIGURATION = "config.json"
MEASURED = ("digits", "cifar10", "cifar100")
"""Data sets whose own values are known."""


def configured_beside(path: Path) -> Statistics | None:
    """Return mean and standard deviation in the configuration that a hub keeps beside a file of timm's weights."""
    try:
        tree = json.loads(path.with_name(HUB_CONFIGURATION).read_bytes()[: 2**20])
    except (OSError, ValueError):
        return None
    return statistics_in(tree.get("pretrained_cfg")) if isinstance(tree, dict) else None


def configured_in(model: nn.Module | None) -> Statistics | None:
    """Return mean and standard deviation in the configuration of a model that timm has made; None of any other."""
    return statistics_in(getattr(model, "pretrained_cfg", None))


def statistics_in(configuration: Any) -> Statistics | None:
    """Return mean and standard deviation in a configuration of timm's, None where it has none for three channels."""
    if not isinstance(configuration, Mapping):
        return None
    found = []
    for name in ("mean", "std"):
        numbers = configuration.get(name)
        if not isinstance(numbers, (list, tuple)) or [*map(type, numbers)] not in ([float] * 3, [int] * 3):
            return None
        found.append((float(numbers[0]), float(numbers[1]), float(numbers[2])))
    mean, std = found
    return (mean, std) if min(std) > 0 else None
