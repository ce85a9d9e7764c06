"""Load weights into a model, from a file or from torchvision, without running pickled code."""

from __future__ import annotations

import math
import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.config.model import is_url
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.model.blocks import Chain, group_steps, owners_of
from hvfreeze.model.families import layout_of
from hvfreeze.model.hugging_face import find_folder, weight_files
from hvfreeze.model.tiny_lm import EMBEDDING, TinyLM
from hvfreeze.model.weight_files import AVERAGED, choose_state, load_content
from hvfreeze.model.weight_names import find_entry, place_of
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.user_code import HF, TIMM
from hvfreeze.wording import first_few

Triple = tuple[float, float, float]
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.", "local_critics.")
BODY = "body."
"""Prefix of the model's own tensors in the state of a model with a multi-level head."""


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the state_dict in file `path`; see `read_state`."""
    return read_state(path)[0]


def read_state(path: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state_dict in file `path`, also inside {"state_dict": ...}, and notes on other content.

    Raises:
        RefusedError: the file is missing, damaged, has other content, NaN, infinity, numbers beyond float32 or tensors
            that are not dense, or would run code.
        UsageError: its format needs a missing library.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings on unusual pickles; the error below is one line
            content = load_content(Path(os.path.expanduser(path)))
    except HvfreezeError:
        raise
    except OSError as error:
        raise RefusedError(
            f"weights ({path}) cannot be read: {error.strerror or error}; give the path of a state_dict, a URL, none, "
            "DEFAULT, or a name of torchvision's such as IMAGENET1K_V1"
        ) from error
    except Exception as error:  # a damaged file makes the unpickler raise anything
        raise RefusedError(
            f"weights ({path}) {_why(error)}; save them with torch.save(model.state_dict(), path)"
        ) from error
    state, notes = choose_state(content, source=path)
    unread = [key for key, tensor in state.items() if not _is_plain(tensor)]
    if unread:
        raise RefusedError(
            f"weights ({path}) hold tensors without values, sparse, quantised or of 8-bit floats in "
            f"{first_few(unread, most=3)}; save them as dense float32"
        )
    broken = [key for key, tensor in state.items() if not _is_finite(tensor)]
    if broken:
        raise RefusedError(
            f"weights ({path}) hold NaN or Inf, as float32, in {first_few(broken, most=3)}; give an intact file"
        )
    return state, notes


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a model's float32 or integer tensor can be copied from this one."""
    small = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta or small)


def _is_finite(tensor: Tensor) -> bool:
    # Models are float32; a float64 may be infinite in it.
    return bool(torch.isfinite(tensor.float() if tensor.is_floating_point() else tensor).all())


def _why(error: Exception) -> str:
    if "TorchScript" in str(error):
        return "are refused: a TorchScript archive holds code, and none was run"
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and wanted:
        return f"are refused: loading them would run code ({wanted[1]}); none was run"
    if isinstance(error, pickle.UnpicklingError):
        return "are refused: this is not a file of tensors, perhaps a pickle that runs code; none was run"
    return "cannot be read: the file is damaged, or not from torch.save or safetensors"


def weights_path(name: str, weights: str) -> Path | None:
    """Return the weight file of `build_model` for `weights` and model `name`; None if there is none, or several."""
    if weights == "none" or (name.startswith(TIMM) and weights == "DEFAULT"):
        return None
    if name.startswith(HF) and weights == "DEFAULT":
        files = weight_files(find_folder(name))
        return files[0] if len(files) == 1 else None
    entry = find_entry(name, weights)
    if entry is not None:
        return place_of(entry.url, hashed=True)
    return place_of(weights) if is_url(weights) else Path(os.path.expanduser(weights))


def pretrained_weights(name: str, *, image_size: int, weights: str = "DEFAULT") -> dict[str, Tensor]:
    """Return torchvision's `weights` of model `name` for images of `image_size` pixels.

    Random state is unchanged. The input rescaling of googlenet and inception_v3 is folded into their first layer.

    Raises:
        UsageError: there are no such weights, or not for this image size.
        RefusedError: they cannot be downloaded.
    """
    if name == "maxvit_t" and image_size % 224:
        raise UsageError(
            f"weights ({weights}) of {name} need an image size that is a multiple of 224, not "
            f"{image_size}; use --image-size 224"
        )
    entry = find_entry(name, weights)
    try:
        with torch.random.fork_rng(devices=[]):
            model = torchvision.models.get_model(name, weights=entry, progress=False)
    except Exception as error:  # network, disk, hash and unpickling raise errors of many kinds
        raise RefusedError(
            f"weights ({weights}) of {name} cannot be downloaded from {entry.url}: {error}; put that "
            f"file into {torch.hub.get_dir()}/checkpoints, give another file with --weights, or use --weights none"
        ) from error
    if getattr(model, "transform_input", False):
        _fold_rescaling(model)
    return dict(model.state_dict())


def statistics_of_entry(entry: Any) -> tuple[Triple, Triple]:
    """Return the mean and standard deviation per channel that a torchvision entry was trained with."""
    preset = entry.transforms()
    (red, green, blue), (r, g, b) = preset.mean, preset.std
    return (red, green, blue), (r, g, b)


@torch.no_grad()
def _fold_rescaling(model: Any) -> None:
    """Fold `transform_input` into the first convolution and its BatchNorm, exact except at the image's border."""
    first = next(module for module in model.children())
    shift = model._transform_input(torch.zeros(1, 3, 1, 1))
    scale = model._transform_input(torch.ones(1, 3, 1, 1)) - shift
    first.bn.running_mean -= (first.conv.weight * shift).sum(dim=(1, 2, 3))
    first.conv.weight *= scale
    model.transform_input = False


def load_weights(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    source: str,
    reset_head: bool = False,
    chain: Chain | None = None,
) -> list[str]:
    """Copy `state` into `model`, converted to its types, and return notes on the head and on ignored tensors.

    Args:
        model: the model.
        state: a state_dict, also with a prefix like "module."; a head that is missing, has another number of classes
            or another type, such as an `Mlp` or a multi-level head, is re-initialised.
        source: name of the weights in messages.
        reset_head: whether to re-initialise the head even if it fits.
        chain: the model's chain, if the user's function returned one.

    Raises:
        RefusedError: a tensor is missing, not part of the model, or of another shape; the head and auxiliary heads
            may differ.
        UsageError: the head must be re-initialised, and its layer is unknown.
    """
    own = model.state_dict()
    layers = head_layers(model, chain)
    if reset_head and not layers:
        raise UsageError(
            f"--reset-head needs a last block with a Linear or a convolution, and "
            f"{type(model).__name__} has neither; end the model with one of these, or omit --reset-head"
        )
    of_head = [key for key in own if key.startswith(tuple(f"{layer}." for layer in layers))]
    notes = []
    body = _body_of(state, own)
    if body is not None:
        notes.append(f"weights ({source}): ignoring the multi-level head")
        # With such a head, the model's own is unused.
        state = {key: tensor for key, tensor in body.items() if key not in of_head}
    state, told = _unwrapped(state, own, source=source)
    notes += told
    state, told = _with_positions(state, model, own, source=source)
    notes += told
    auxiliary = {key for key in state if key.startswith(AUXILIARY) and key not in own}
    if auxiliary:
        notes.append(f"weights ({source}): ignoring the auxiliary heads")
    fitting = {key: tensor for key, tensor in state.items() if key not in auxiliary}
    resized = {key for key in of_head if _other_size(own, fitting, key)}
    absent = bool(layers) and not any(key in fitting for key in of_head)
    head = layers[0] if layers else ""
    other_kind = [key for key in fitting if absent and key.startswith(f"{head}.")]
    elsewhere = _head_elsewhere(fitting, own, head) if absent and not other_kind else []
    ignored, differs = (other_kind, "type") if other_kind else (elsewhere, "name")
    fitting = {key: tensor for key, tensor in fitting.items() if key not in ignored}
    if ignored:
        notes.append(
            f"weights ({source}): ignoring a head of another {differs} ({first_few(ignored, most=3)}); {head} is "
            f"initialised at random"
        )
    elif absent:
        notes.append(f"weights ({source}): no head {head}; it is initialised at random")
    elif resized:
        old, new = (some[next(key for key in of_head if key in resized)].shape[0] for some in (fitting, own))
        notes.append(
            f"weights ({source}): head {head} is initialised at random: the weights have {old} classes, the model {new}"
        )
    elif reset_head:
        resized = set(of_head)
        notes.append(f"weights ({source}): head {head} is initialised at random (--reset-head)")
    elif layers:
        new = own[of_head[0]].shape[0]
        notes.append(
            f"weights ({source}): head {head} is kept, with {new} classes; if its classes or their "
            f"order differ, use --reset-head"
        )
    # Old files lack BatchNorm's batch counters, which are unused here.
    spared = set(of_head) if absent else set()
    missing = [k for k in own if k not in fitting and k not in spared and not k.endswith("num_batches_tracked")]
    unexpected = [key for key in fitting if key not in own]
    reshaped = [
        f"{key} {tuple(fitting[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in fitting and key not in resized and fitting[key].shape != own[key].shape
    ]
    found = {"missing": missing, "not part of the model": unexpected, "of another shape": reshaped}
    if missing or unexpected or reshaped:
        what = "; ".join(f"{kind}: {first_few(keys, most=3)}" for kind, keys in found.items() if keys)
        raise RefusedError(
            f"weights ({source}) do not fit {type(model).__name__}; choose the --model that they belong to ({what})"
        )
    # `own` has the version numbers that some modules need for loading.
    own.update({key: tensor for key, tensor in fitting.items() if key not in resized})
    model.load_state_dict(own)
    return notes


HEADS = (nn.Linear, nn.Conv2d)
"""Types of layers that return logits, the usual ones first."""


def head_layers(model: nn.Module, chain: Chain | None = None) -> list[str]:
    """Return the names of the head: the layer that returns the logits, and the later layers of its nn.Sequential.

    This layer is the last Linear of the last block, else its last convolution; without one the list is empty. For a
    language model it is the embedding, which is tied to the output layer. For `chain` see `load_weights`.

    Raises:
        UsageError: the model cannot be cut into blocks.
    """
    if isinstance(model, TinyLM):
        return [EMBEDDING.partition(".")[0]]
    last_block = _last_block(model) if chain is None else chain.blocks[-1].modules
    named = [(name, module) for name, module in model.named_modules() if module in last_block]
    for kind in HEADS:
        names = [name for name, module in named if isinstance(module, kind)]
        if names:
            parent, _, last = names[-1].rpartition(".")
            around = model.get_submodule(parent)
            children = [name for name, _ in around.named_children()] if isinstance(around, nn.Sequential) else [last]
            return [f"{parent}.{name}" if parent else name for name in children[children.index(last) :]]
    return []


def _last_block(model: nn.Module) -> Sequence[nn.Module]:
    layout = layout_of(model)
    if not layout.verified:
        # The order of definition may differ from that of the calls. Importing torch.fx takes a tenth of a second.
        from hvfreeze.model.forward_steps import used_last

        last = used_last(model)
        if last is not None:
            return last
    groups = group_steps(layout, scheme="residual")
    owners = owners_of(groups)
    return [module for name, module in model.named_modules() if owners.blocks_with(name) == {len(groups) - 1}]


def _body_of(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Return the model's own part of the state of a `MultiLevelClassifier`; None for other states."""
    body = {key.removeprefix(BODY): tensor for key, tensor in state.items() if key.startswith(BODY)}
    others = all(key.startswith((BODY, "head.")) for key in state)
    return body if others and any(key in own for key in body) and not any(key.startswith(BODY) for key in own) else None


WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that torch.compile, FSDP and activation checkpointing insert into names, at any position."""


def _unwrapped(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], *, source: str
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Return `state` without `WRAPPERS` and without its prefix, such as "module.", and a note on other names.

    The prefix is the one that matches most names of the model, which may have such prefixes itself.
    """
    if not any(map(WRAPPERS.search, own)):
        state = {WRAPPERS.sub("", key): tensor for key, tensor in state.items()}
    prefixes: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        for number in range(len(parts)):
            if ".".join(parts[number:]) in own:
                prefixes[".".join([*parts[:number], ""]) if number else ""] += 1
    most = max(prefixes.values(), default=0)
    if prefixes[""] == most:
        return state, []
    # If the file has a model and its running average, take the model.
    prefix, *_ = sorted(
        (each for each, count in prefixes.items() if count == most),
        key=lambda each: (bool(AVERAGED.search(each)), each),
    )
    found = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    outside = [key for key in state if not key.startswith(prefix)]
    found |= {key: state[key] for key in outside if key in own and key not in found}
    left = [key for key in outside if key not in own]
    notes = (
        [f"weights ({source}): ignoring names that do not begin with {prefix}: {first_few(left, most=3)}"]
        if left
        else []
    )
    return found, notes


POSITIONS = re.compile(r"(^|[._])(pos|position|positional)_embed\w*(\.weight)?$")


def _with_positions(
    state: Mapping[str, Tensor], model: nn.Module, own: Mapping[str, Tensor], *, source: str
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Interpolate the position embeddings of a vision transformer to the model's image size; return the state and
    notes.
    """
    found, notes = dict(state), list[str]()
    for key in filter(POSITIONS.search, own):
        if key not in state or state[key].dim() != own[key].dim() or state[key].shape[-1] != own[key].shape[-1]:
            continue
        grids = _grids(*(tensor.numel() // tensor.shape[-1] for tensor in (state[key], own[key])))
        if state[key].shape == own[key].shape or grids is None:
            continue
        tokens, old, new = grids
        rows = state[key].reshape(tokens + old**2, -1).float()
        # As in torchvision and in timm.
        how = {"align_corners": True} if type(model) is torchvision.models.VisionTransformer else {"antialias": True}
        image = rows[tokens:].T.reshape(1, -1, old, old)
        image = functional.interpolate(image, size=(new, new), mode="bicubic", **how)
        found[key] = torch.cat([rows[:tokens], image.reshape(-1, new**2).T]).reshape(own[key].shape)
        notes.append(f"weights ({source}): {key} is interpolated from {old}x{old} to {new}x{new} patches")
    return found, notes


def _grids(there: int, here: int) -> tuple[int, int, int] | None:
    """Return the number of positions that are not patches, and the sides of both square grids of patches.

    None if no such grids exist.
    """
    # No extra token, a class token, or a class token and another one.
    for tokens in (1, 0, 2):
        old, new = (math.isqrt(max(0, positions - tokens)) for positions in (there, here))
        if old and new and (old**2, new**2) == (there - tokens, here - tokens):
            return tokens, old, new
    return None


def _head_elsewhere(state: Mapping[str, Tensor], own: Mapping[str, Tensor], head: str) -> list[str]:
    """Return the names of a layer in the weights alone that has the input size of the model's head."""
    unknown = [key for key in state if key not in own]
    layers = {key.rpartition(".")[0] for key in unknown}
    there, here = (some.get(f"{name}.weight") for some, name in ((state, min(layers, default="")), (own, head)))
    is_head = there is not None and here is not None and there.dim() > 1 and there.shape[1:] == here.shape[1:]
    return unknown if len(layers) == 1 and is_head else []


def _other_size(own: Mapping[str, Tensor], state: Mapping[str, Tensor], key: str) -> bool:
    if key not in state or state[key].dim() != own[key].dim():
        return False
    return state[key].shape[:1] != own[key].shape[:1] and state[key].shape[1:] == own[key].shape[1:]
