"""The normalisation of a run's images: from the settings, from the pretraining, or from the data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hvfreeze.config.model import ModelConfig, is_downloaded
from hvfreeze.config.tree import Config
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.data.views import Statistics
from hvfreeze.errors import RefusedError
from hvfreeze.inference.card import read_card, sha256_of
from hvfreeze.model.hugging_face import read_statistics
from hvfreeze.model.model_sources import timm_statistics
from hvfreeze.model.weight_names import entry_of_file, find_entry
from hvfreeze.model.weights import statistics_of_entry
from hvfreeze.user_code import HF, TIMM


@dataclass(frozen=True)
class Normalisation:
    """The mean and standard deviation per channel for normalising images, and their source."""

    statistics: Statistics
    source: str
    advice: str = ""
    """The way out if this may be wrong."""

    def describe(self) -> str:
        """Return the log line."""
        mean, std = (", ".join(f"{number:.4g}" for number in numbers) for numbers in self.statistics)
        way = self.advice and f"; {self.advice}"
        return f"images are normalised with mean {mean} and standard deviation {std} ({self.source}{way})"


def normalisation_of(config: Config, image_set: ImageSet, model: nn.Module | None) -> Normalisation:
    """Return the normalisation of a run: from the settings, from the pretraining, or from the data."""
    given = config.data.statistics()
    if given is not None:
        return Normalisation(given, "--mean and --std")
    known = trained_with(config.model, model)
    if known is not None:
        return known
    name = image_set.name
    source, advice = f"those of {name}" if name in MEASURED else "ImageNet's, as default", ""
    configured = configured_in(model)
    if configured is not None and configured != (image_set.mean, image_set.std):
        mean, std = (",".join(f"{number:.4g}" for number in numbers) for numbers in configured)
        advice = (
            f"if its weights are pretrained, use the values of the model's configuration: --mean {mean} --std {std}"
        )
    return Normalisation((image_set.mean, image_set.std), source, advice)


def trained_with(settings: ModelConfig, model: nn.Module | None) -> Normalisation | None:
    """Return the mean and standard deviation of the pretraining; None if unknown.

    Sources, in this order: the card of an hvfreeze run, torchvision's entry, the configuration file of a hub, timm or
    the image processor, and the model's own configuration.
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
"""Datasets with known values."""


def configured_beside(path: Path) -> Statistics | None:
    """Return the mean and standard deviation in the configuration file next to timm's weights from a hub."""
    try:
        tree = json.loads(path.with_name(HUB_CONFIGURATION).read_bytes()[: 2**20])
    except (OSError, ValueError):
        return None
    return statistics_in(tree.get("pretrained_cfg")) if isinstance(tree, dict) else None


def configured_in(model: nn.Module | None) -> Statistics | None:
    """Return the mean and standard deviation in the configuration of a timm model; None for others."""
    return statistics_in(getattr(model, "pretrained_cfg", None))


def statistics_in(configuration: Any) -> Statistics | None:
    """Return the mean and standard deviation in a timm configuration; None if it has none for three channels."""
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
