"""Build classifiers by name, for a number of classes and an image size, with weights.

    built = build_model("resnet18", num_classes=10, weights="backbone.pt", image_size=64)
    built.model, built.notes            # notes: log lines, such as a re-initialised head

Random parameters depend on torch's seed alone: seed before the call.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from hvfreeze.config.data import MOST_PIXELS
from hvfreeze.config.head import parse_mlp
from hvfreeze.config.model import TINY_LM, is_url
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.imports import import_whole
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.hugging_face import build_classifier, read_architecture, read_pretrained
from hvfreeze.model.mlp import Mlp, replace_head
from hvfreeze.model.narrow_resnets import NARROW_RESNETS, narrow_resnet
from hvfreeze.model.small_maps import run_convolutions
from hvfreeze.model.tiny_lm import TinyLM
from hvfreeze.model.weight_names import download, find_entry
from hvfreeze.model.weights import load_weights, pretrained_weights, read_state
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.user_code import HF, TIMM, call, told
from hvfreeze.wording import plural

Triple = tuple[float, float, float]


def own_model(name: str, *, num_classes: int, image_size: int) -> tuple[nn.Module, Chain | None]:
    """Call the function `name` and return its module, and its chain if it returns one.

    The function gets `num_classes` and `image_size` as keyword arguments, if it has these parameters.
    """
    made = call("model", name, num_classes=num_classes, image_size=image_size)
    model, chain = (made.model, made) if isinstance(made, Chain) else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model ({name}) must return an nn.Module or a hvfreeze.model.blocks.Chain, not {type(made).__name__}"
        )
    lazy = [part for part, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"--model ({name}) must return a model with initialised parameters, and {lazy[0]} has no "
            f"size yet; run the model once in the function, or give its lazy layers their input sizes"
        )
    return model, chain


def timm_model(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    """Return timm's model `name` with random parameters."""
    timm, bare = library(), bare_name(name)
    if not timm.is_model(bare):
        raise UsageError(
            f"--model ({name}) is not a model of timm {timm.__version__}; use a name from timm.list_models()"
        )
    try:
        return _create(timm, bare, image_size=image_size, num_classes=num_classes)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(
            f"--model ({name}) cannot be built for images of {plural(image_size, 'pixel')}: {error}"
        ) from error


def _create(timm: Any, bare: str, *, image_size: int, **more: Any) -> nn.Module:
    """Build timm's model, with the image size if it takes one."""
    try:
        model: nn.Module = timm.create_model(bare, img_size=image_size, **more)
    except TypeError:
        # Convolutional models take any size and have no argument for it.
        model = timm.create_model(bare, **more)
    return model


def timm_weights(name: str, *, image_size: int) -> dict[str, Tensor]:
    """Return timm's weights of a model, downloaded if missing."""
    timm, bare = library(), bare_name(name)
    try:
        return dict(_create(timm, bare, image_size=image_size, pretrained=True).state_dict())
    except Exception as error:  # the network, the disk and the hub fail in as many ways
        raise RefusedError(
            f"weights (DEFAULT) of {name} cannot be downloaded: {error}; give a file with --weights, or "
            f"use --weights none"
        ) from error


def timm_statistics(name: str) -> tuple[Triple, Triple] | None:
    """Return the mean and standard deviation that timm's weights were trained with; None if timm does not know them."""
    known = library().get_pretrained_cfg(bare_name(name))
    if known is None:
        return None
    (red, green, blue), (r, g, b) = known.mean, known.std
    return (red, green, blue), (r, g, b)


def library() -> Any:
    """Return the timm library. Raises UsageError if it is not installed."""
    try:
        return import_whole("timm")
    except ImportError as error:
        raise UsageError(f"--model {TIMM}NAME needs the timm library ({error}): pip install timm") from error


def bare_name(name: str) -> str:
    """Return timm's name of a model; refuse names that would download from elsewhere."""
    bare = name.removeprefix(TIMM)
    if not re.fullmatch(r"[A-Za-z0-9_.]+", bare):
        raise UsageError(f"--model ({name}) must be {TIMM}NAME with a name from timm.list_models()")
    return bare


def set_memory_formats(built: BuiltModel, image_shape: Sequence[int]) -> BuiltModel:
    """Set the memory format of a model's weights for channels_last images, (C, H, W); values are unchanged.

    A convolution whose output is a single pixel keeps contiguous weights, such as the last stage of a ResNet-18 at 32
    pixels, whose training step is 1.08x faster then.

    Images and weights stay contiguous, and a note says so, if the forward pass fails in channels_last, as with
    `x.view(x.size(0), -1)`. Windows of text, (T,), have no memory format.

    Raises:
        UsageError: the model refuses images of this shape; names the smallest size of a torchvision model.
    """
    if len(image_shape) == 1:
        return built
    model = built.model
    try:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for convolution, _, side in run_convolutions(model, image_shape):
            if side == 1:
                convolution.weight.data = convolution.weight.data.contiguous()
    except Exception as error:  # the user's module may fail in any way
        why = _first_line(error)
    else:
        return built
    hook = model.register_forward_pre_hook(_made_contiguous)
    try:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        run_convolutions(model, image_shape)
    except Exception as error:
        hook.remove()
        is_known = type(model).__module__.startswith("torchvision.")
        sizes = f"{smallest_image_size(model)} or more" if is_known else "with a size that it takes"
        raise UsageError(
            f"model ({type(model).__name__}) fails on images of {image_shape[1]}x{image_shape[2]} "
            f"pixels: {_first_line(error)}; use --image-size {sizes}, or another --model"
        ) from error
    note = (
        f"model ({type(model).__name__}): images and weights are contiguous, because it fails in channels_last: {why}"
    )
    return replace(built, notes=[*built.notes, note], contiguous=True)


def _first_line(error: Exception) -> str:
    says_all = str(error) and isinstance(error, (RuntimeError, ValueError, AssertionError))
    return str(error).partition("\n")[0] if says_all else told(error)


def _made_contiguous(module: nn.Module, inputs: Any) -> Any:
    return tuple(each.contiguous() if isinstance(each, Tensor) else each for each in inputs)


@dataclass(frozen=True)
class BuiltModel:
    """A model and its log lines."""

    model: nn.Module
    notes: list[str]
    chain: Chain | None = None
    """Chain from the user's function, if it returned one."""
    contiguous: bool = False
    """Whether the model needs contiguous images."""

    def in_blocks(self, *, scheme: str, example: Tensor | None = None) -> Chain:
        """Return the chain of the user's function, or divide the model by `cut_into_blocks`."""
        chain = self.chain or cut_into_blocks(self.model, scheme=scheme, example=example)
        if not self.contiguous:
            return chain
        first, *others = chain.blocks
        return replace(chain, blocks=(replace(first, steps=(Tensor.contiguous, *first.steps)), *others))


def model_names() -> list[str]:
    """Return the sorted names of torchvision's classification models, the narrow ResNets and `mlp`."""
    return sorted([*torchvision.models.list_models(module=torchvision.models), *NARROW_RESNETS, "mlp"])


def build_model(
    name: str,
    *,
    num_classes: int,
    weights: str = "none",
    image_size: int,
    reset_head: bool = False,
    head: str = "last",
    architecture: Mapping[str, Any] | None = None,
) -> BuiltModel:
    """Build the classifier `name`, float32, in training mode, without auxiliary heads.

    Args:
        name: one of `model_names()`, mlp-WxW..., `tiny-lm`, timm:NAME, hf:PATH_OR_NAME, or package:function, which runs
            that code.
        num_classes: outputs of the head.
        weights: `none`, `DEFAULT` or another name of torchvision's (downloaded), a URL, or the path of a state_dict. A
            head for another number of classes is not loaded, and a note says so.
        image_size: height and width of the images in pixels; characters per window for a language model.
        reset_head: whether to re-initialise the head even if the weights have one with this number of classes.
        head: value of --head; `mlp` and `mlp-WxW...` replace the last layer by an `Mlp`, others change nothing.
        architecture: configuration of a model hf:..., instead of its folder; None reads the folder.

    Raises:
        UsageError: there is no such model or head, or it cannot be built for images of this size.
        RefusedError: the weights are unreadable or do not fit.
    """
    size: Any = {"num_classes": num_classes, "image_size": image_size}
    chain: Chain | None = None
    if name.startswith(TIMM):
        model = timm_model(name, **size)
    elif name.startswith(HF):
        model = build_classifier(read_architecture(name) if architecture is None else architecture, **size)
    elif ":" in name:
        model, chain = own_model(name, **size)
    else:
        model = named_model(name, **size)
    notes: list[str] = []
    if weights != "none":
        state, notes = read_initial(name, weights, image_size=image_size)
        notes = [*notes, *load_weights(model, state, source=weights, reset_head=reset_head, chain=chain)]
    if parse_mlp("head", head) is not None:
        if chain is not None:
            raise UsageError(f"--head ({head}): {name} returns a Chain; add the head in that function")
        replace_head(model, head)
    return BuiltModel(model, notes, chain)


def named_model(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    """Build a torchvision, ResNet, MLP or language model by name; see `build_model`."""
    known = [*model_names(), TINY_LM]
    if parse_mlp("model", name) is None and name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=4)
        hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(known)}"
        raise UsageError(
            f"model ({name}) must be a torchvision classifier, resnet20, resnet110, mlp, tiny-lm, "
            f"timm:NAME, hf:FOLDER or package:function; {hint}"
        )
    return _construct(name, num_classes=num_classes, image_size=image_size)


def read_initial(name: str, weights: str, *, image_size: int) -> tuple[Mapping[str, Tensor], list[str]]:
    """Return the initial weights of model `name`, downloaded if necessary, and notes; see `build_model`."""
    if weights == "DEFAULT" and name.startswith(HF):
        return read_pretrained(name), []
    if weights == "DEFAULT" and name.startswith(TIMM):
        return timm_weights(name, image_size=image_size), []
    if find_entry(name, weights) is not None:
        return pretrained_weights(name, image_size=image_size, weights=weights), []
    return read_state(str(download(weights)) if is_url(weights) else weights)


def smallest_image_size(model: nn.Module) -> int:
    """Return the smallest height and width in pixels that `model` accepts, found without arithmetic.

    Vision transformers (vit, maxvit) accept only the size that they were built for.
    """
    sizes = {"VisionTransformer": lambda m: m.image_size, "MaxVit": lambda m: 4 * m.blocks[0].grid_size[0]}
    fixed: dict[str, Callable[[Any], int]] = sizes
    if type(model).__name__ in fixed:
        return fixed[type(model).__name__](model)
    too_small, works = 0, 1
    while not _takes(model, works):
        too_small, works = works, 2 * works
        if works > MOST_PIXELS:
            raise UsageError(f"model ({type(model).__name__}) accepts no image size up to {MOST_PIXELS} pixels")
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
    widths = parse_mlp("model", name)
    if widths is not None:
        return Mlp(3 * image_size**2, widths, num_classes)
    if name == TINY_LM:
        return TinyLM(num_classes, context=image_size)
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
    """Build torchvision's maxvit_t with attention windows that divide images of this size."""
    _check_multiple("maxvit_t", image_size, of=32)
    window = 7  # torchvision's
    model: nn.Module = torchvision.models.maxvit.MaxVit(
        input_size=(image_size, image_size),
        stem_channels=64,
        partition_size=window if image_size % (32 * window) == 0 else image_size // 32,
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
            f"image size ({image_size}) must be a multiple of {of} for {name}, at least {of}; use --image-size {near}"
        )
