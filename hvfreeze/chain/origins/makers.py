"""Models that torchvision has not: a function of the user's own, or a model of the timm library."""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import Tensor, nn

from hvfreeze.chain.blocks import Chain
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.named_code import TIMM, call

Triple = tuple[float, float, float]


def own_model(name: str, *, num_classes: int, image_size: int) -> tuple[nn.Module, Chain | None]:
    """Return what the function `name` makes: a module, and its chain where it wrote that out itself.

    The function is given `num_classes` and `image_size` by name, as far as it takes them.

    Raises:
        UsageError: there is no such function, it fails, or it makes something else.
    """
    made = call("model", name, num_classes=num_classes, image_size=image_size)
    if isinstance(made, Chain):
        return made.model, made
    if not isinstance(made, nn.Module):
        raise UsageError(f"--model ({name}) must return an nn.Module or a hvfreeze.Chain, not {type(made).__name__}")
    return made, None


def timm_model(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    """Return timm's model `name` with random parameters.

    Raises:
        UsageError: timm is not installed, or has no such model of this image size.
    """
    timm, bare = library(), bare_name(name)
    if not timm.is_model(bare):
        raise UsageError(f"--model ({name}) is no model of timm {timm.__version__}; timm.list_models() has them all")
    try:
        return made(timm, bare, num_classes=num_classes, image_size=image_size)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"--model ({name}) cannot be made for images of {image_size} pixels: {error}") from error


def made(timm: Any, bare: str, **wanted: int) -> nn.Module:
    """Return timm's model, told the image size where it asks for one."""
    classes, size = wanted["num_classes"], wanted["image_size"]
    try:
        model: nn.Module = timm.create_model(bare, num_classes=classes, img_size=size)
    except TypeError:
        # Convolutional models take any size, and no argument for it.
        model = timm.create_model(bare, num_classes=classes)
    return model


def timm_weights(name: str, *, image_size: int) -> dict[str, Tensor]:
    """Return timm's own weights of a model, downloaded where they are not there.

    Raises:
        RefusedError: there are none, or they cannot be downloaded.
    """
    timm, bare = library(), bare_name(name)
    try:
        try:
            state: dict[str, Tensor] = timm.create_model(bare, pretrained=True, img_size=image_size).state_dict()
        except TypeError:
            state = timm.create_model(bare, pretrained=True).state_dict()
    except Exception as error:  # the network, the disk and the hub fail in as many ways
        raise RefusedError(
            f"weights (DEFAULT) of {name} cannot be had: {error}; give a file with --weights, or pass --weights none"
        ) from error
    return dict(state)


def timm_statistics(name: str) -> tuple[Triple, Triple] | None:
    """Return the mean and standard deviation with which timm's weights of a model were trained, as far as it says."""
    known = library().get_pretrained_cfg(bare_name(name))
    if known is None:
        return None
    (red, green, blue), (r, g, b) = known.mean, known.std
    return (red, green, blue), (r, g, b)


def library() -> Any:
    """Return the timm library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UsageError(f"--model {TIMM}NAME needs the timm library ({error}): pip install timm") from error


def bare_name(name: str) -> str:
    """Return timm's name of a model; one that would be fetched from elsewhere is refused."""
    bare = name.removeprefix(TIMM)
    if not re.fullmatch(r"[A-Za-z0-9_.]+", bare):
        raise UsageError(f"--model ({name}) must be {TIMM}NAME with a name out of timm.list_models()")
    return bare
