"""Torchvision classifiers by name: constructed for a number of classes and an image size, with weights from a file.

    built = build_model("resnet18", num_classes=10, weights="backbone.pt", image_size=64)
    built.model, built.notes            # notes: lines that the user should read, such as a head that starts afresh

Parameters that start at random depend on torch's seed alone: seed before the call.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.origins.makers import own_model, timm_model, timm_weights
from hvfreeze.chain.origins.narrow_resnets import NARROW_RESNETS, narrow_resnet
from hvfreeze.chain.origins.weights import load_weights, pretrained_weights, read_weights
from hvfreeze.errors import UsageError
from hvfreeze.named_code import TIMM
from hvfreeze.torchvision_shim import torchvision

MAXVIT_WINDOW = 7
LARGEST_IMAGE = 2048
ANY_IMAGE = (
    "EfficientNet",
    "MNASNet",
    "MobileNetV2",
    "MobileNetV3",
    "NarrowResNet",
    "RegNet",
    "ResNet",
    "ShuffleNetV2",
)
"""Classes of models that run with images of a pixel, and all larger ones: trying would load torch's compiler."""


@dataclass(frozen=True)
class BuiltModel:
    """A model, and lines about it for the user."""

    model: nn.Module
    notes: list[str]
    chain: Chain | None = None
    """Where the user's own function wrote it out."""


def model_names() -> list[str]:
    """Return the names of torchvision's classification models and of the narrow ResNets, sorted."""
    return sorted([*torchvision.models.list_models(module=torchvision.models), *NARROW_RESNETS])


def build_model(
    name: str, *, num_classes: int, weights: str = "none", image_size: int, reset_head: bool = False
) -> BuiltModel:
    """Return the classifier `name`, float32, in training mode, without auxiliary heads.

    Args:
        name: one of `model_names()`, timm:NAME, or package:function, whose code is run.
        num_classes: outputs of the head.
        weights: `none`, `DEFAULT` (torchvision's, downloaded) or the path of a state_dict. A head for another number of
            classes is left as initialised, and a note says so.
        image_size: height and width of the images in pixels.
        reset_head: whether the head starts afresh also where the weights have one of as many classes.

    Raises:
        UsageError: there is no such model, or it takes no images of this size.
        RefusedError: the weights cannot be read, or do not fit.
    """
    if ":" in name:
        return build_other(name, num_classes=num_classes, weights=weights, image_size=image_size, reset_head=reset_head)
    if name not in model_names():
        close = difflib.get_close_matches(name.lower(), model_names(), n=4)
        hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(model_names())}"
        raise UsageError(
            f"model ({name}) is no torchvision classifier, resnet20, resnet110, timm:NAME or package:function; {hint}"
        )
    model = _construct(name, num_classes=num_classes, image_size=image_size)
    if type(model).__name__ not in ANY_IMAGE and not _takes(model, image_size):
        smallest = smallest_image_size(model)
        raise UsageError(
            f"image size ({image_size}) is too small for {name}: the smallest that works is {smallest}; "
            f"pass --image-size {smallest} or more"
        )
    if weights == "none":
        return BuiltModel(model, [])
    default = weights == "DEFAULT"
    if default and name in NARROW_RESNETS:
        raise UsageError(f"weights (DEFAULT): torchvision has none for {name}; give a file, or pass --weights none")
    state = pretrained_weights(name, image_size=image_size) if default else read_weights(weights)
    return BuiltModel(model, load_weights(model, state, source=weights, reset_head=reset_head))


def build_other(name: str, *, num_classes: int, weights: str, image_size: int, reset_head: bool) -> BuiltModel:
    """Return a model of timm or of the user's own; see `build_model`."""
    chain: Chain | None = None
    if name.startswith(TIMM):
        model = timm_model(name, num_classes=num_classes, image_size=image_size)
    else:
        model, chain = own_model(name, num_classes=num_classes, image_size=image_size)
    if weights == "none":
        return BuiltModel(model, [], chain)
    if weights == "DEFAULT" and not name.startswith(TIMM):
        raise UsageError(f"--weights (DEFAULT) must be none or a file: {name} is a model of your own")
    state = timm_weights(name, image_size=image_size) if weights == "DEFAULT" else read_weights(weights)
    return BuiltModel(model, load_weights(model, state, source=weights, reset_head=reset_head), chain)


def smallest_image_size(model: nn.Module) -> int:
    """Return the least height and width in pixels with which `model` runs; no arithmetic is done to find it.

    Vision transformers (vit, maxvit) take one size only, the one that they were constructed for.

    Raises:
        UsageError: the model runs with no size up to 2048 pixels.
    """
    sizes = {"VisionTransformer": lambda m: m.image_size, "MaxVit": lambda m: 4 * m.blocks[0].grid_size[0]}
    fixed: dict[str, Callable[[Any], int]] = sizes
    if type(model).__name__ in fixed:
        return fixed[type(model).__name__](model)
    too_small, works = 0, 1
    while not _takes(model, works):
        too_small, works = works, 2 * works
        if works > LARGEST_IMAGE:
            raise UsageError(f"model ({type(model).__name__}) runs with no image size up to {LARGEST_IMAGE} pixels")
    while works - too_small > 1:
        middle = (too_small + works) // 2
        too_small, works = (too_small, middle) if _takes(model, middle) else (middle, works)
    return works


def _takes(model: nn.Module, image_size: int) -> bool:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    # Two images: BatchNorm in training mode refuses a single value per channel.
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    try:
        with torch.no_grad():
            functional_call(model, shapes, (images,))
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


def _construct(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    if name in NARROW_RESNETS:
        return narrow_resnet(name, num_classes=num_classes)
    extra: dict[str, Any] = {}
    if name.startswith("vit_"):
        _check_multiple(name, image_size, of=int(name.rpartition("_")[2]))
        extra = {"image_size": image_size}
    elif name == "maxvit_t":
        return _maxvit_t(num_classes=num_classes, image_size=image_size)
    elif name in {"googlenet", "inception_v3"}:
        extra = {"aux_logits": False, "transform_input": False, "init_weights": True}
    model: nn.Module = torchvision.models.get_model(name, num_classes=num_classes, **extra)
    return model


def _maxvit_t(*, num_classes: int, image_size: int) -> nn.Module:
    """Return torchvision's maxvit_t, with attention windows that divide the image also where it is not 224 pixels."""
    _check_multiple("maxvit_t", image_size, of=32)
    model: nn.Module = torchvision.models.maxvit.MaxVit(
        input_size=(image_size, image_size),
        stem_channels=64,
        partition_size=MAXVIT_WINDOW if image_size % (32 * MAXVIT_WINDOW) == 0 else image_size // 32,
        block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2],
        head_dim=32,
        stochastic_depth_prob=0.2,
        num_classes=num_classes,
    )
    return model


def _check_multiple(name: str, image_size: int, *, of: int) -> None:
    if image_size < of or image_size % of:
        near = max(of, round(image_size / of) * of)
        raise UsageError(
            f"image size ({image_size}) must be a multiple of {of} for {name}, at least {of}; pass --image-size {near}"
        )
