"""Image classifiers of the transformers library: load them from a folder or the Hugging Face cache, and save them.

    model = build_classifier(read_architecture("hf:vit-base"), num_classes=10, image_size=224)
    model.load_state_dict(read_pretrained("hf:vit-base"), strict=False)
    logits = model(images)

Everything but the layouts needs the library, which is imported on demand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvfreeze.config.data import RESAMPLES
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.imports import import_whole
from hvfreeze.model.steps import Layout, Step, classifier_layout, make_step, split_step
from hvfreeze.user_code import HF
from hvfreeze.wording import reason_in_a_line

CONFIGURATION, PROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("*.safetensors", "*.bin")
"""Names of weight files, the preferred ones first."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
NOT_KEPT = ("architectures", "auto_map", "dtype", "id2label", "label2id", "quantization_config", "torch_dtype")
"""Entries of a configuration that do not describe the network, or would download code."""
BY_EDGE = ("ConvNext", "Bit", "CLIP", "LeViT", "PoolFormer")
"""Image processors for which a numeric size is the shorter side."""
CROP_SHARE, WHOLE_FROM = 224 / 256, 384
"""Default `crop_pct` of ConvNext's image processor, and the side in pixels from which it does not crop."""
Triple = tuple[float, float, float]


def _first_token(x: Tensor) -> Tensor:
    return x[:, 0]


def _first_and_mean(before: int, x: Tensor) -> Tensor:
    """Return the class token and the mean of the patches, (N, 2 D), of (N, T, D) with `before` tokens before them."""
    return torch.cat([x[:, 0], x[:, before:].mean(dim=1)], dim=1)


def _mean(x: Tensor) -> Tensor:
    return x.mean([-2, -1])


def _tokens_first(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _channels_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _flatten(x: Tensor) -> Tensor:
    return x.flatten(1)


def _embed_in_grid(embeddings: nn.Module, x: Tensor) -> Tensor:
    tokens, (height, width) = embeddings(x)
    grid: Tensor = tokens.unflatten(1, (height, width))
    return grid


def _run_in_grid(stage: Any, x: Tensor) -> Tensor:
    height, width = x.shape[1:3]
    tokens = stage(x.flatten(1, 2), (height, width))[0]
    if stage.downsample is not None:
        height, width = (height + 1) // 2, (width + 1) // 2
    grid: Tensor = tokens.unflatten(1, (height, width))
    return grid


def _items(model: Any, *names: str) -> list[str]:
    """Return the names of the modules in the first existing list among `names` of the base model."""
    prefix = model.base_model_prefix
    for name in names:
        try:
            found = model.get_submodule(f"{prefix}.{name}")
        except AttributeError:
            continue
        return [f"{prefix}.{name}.{child}" for child, _ in found.named_children()]
    raise UsageError(
        f"model ({type(model).__name__}) has no {' or '.join(names)}; install another transformers version"
    )


def _layers_layout(model: Any, pick: Callable[[Tensor], Tensor]) -> Layout:
    """Return the layout of a transformer with tokens (N, T, D); `pick` selects the classifier's input."""
    prefix, layers = model.base_model_prefix, _items(model, "layers", "encoder.layer")
    body = [make_step(model, name) for name in (f"{prefix}.embeddings", *layers)]
    tail = [make_step(model, f"{prefix}.layernorm", pick, "classifier")]
    return classifier_layout(model, body, tail, stages=layers[:: max(1, len(layers) // 4)])


def _vit(model: Any) -> Layout:
    return _layers_layout(model, _first_token)


def _dinov2(model: Any) -> Layout:
    before = 1 + getattr(model.config, "num_register_tokens", 0)
    return _layers_layout(model, partial(_first_and_mean, before))


def _swin(model: Any) -> Layout:
    """Return the layout with maps (N, H, W, C) between steps: a stage needs the height and width of its tokens."""
    prefix = model.base_model_prefix
    parts = {f"{prefix}.embeddings": _embed_in_grid, **dict.fromkeys(_items(model, "encoder.layers"), _run_in_grid)}
    body = [
        make_step(model, partial(run, model.get_submodule(name)), name=name, owns=[name]) for name, run in parts.items()
    ]
    norm, pooler = f"{prefix}.layernorm", f"{prefix}.pooler"
    tail = [make_step(model, _tokens_first, norm, _channels_first, pooler, _flatten, "classifier", name=norm)]
    return classifier_layout(model, body, tail, stages=[step.name for step in body[1:]])


def _convnext(model: Any) -> Layout:
    prefix, stages = model.base_model_prefix, _items(model, "encoder.stages")
    body = [make_step(model, f"{prefix}.embeddings"), *(_convnext_stage(model, name) for name in stages)]
    norm = f"{prefix}.layernorm"
    return classifier_layout(model, body, [make_step(model, _mean, norm, "classifier", name=norm)], stages=stages)


def _convnext_stage(model: Any, name: str) -> Step:
    smaller, layers = (
        [f"{name}.{part}.{child}" for child, _ in model.get_submodule(f"{name}.{part}").named_children()]
        for part in ("downsampling_layer", "layers")
    )
    parts = (make_step(model, *smaller, layers[0]), *(make_step(model, layer) for layer in layers[1:]))
    return Step(name, (model.get_submodule(name),), (name,), parts)


def _resnet(model: Any) -> Layout:
    prefix, stages = model.base_model_prefix, _items(model, "encoder.stages")
    body = [make_step(model, f"{prefix}.embedder"), *(split_step(model, name, layers="layers") for name in stages)]
    return classifier_layout(model, body, [make_step(model, f"{prefix}.pooler", "classifier")], stages=stages)


class Family(NamedTuple):
    """An architecture of the library."""

    classifier: str
    layout: Callable[[Any], Layout]
    has_one_size: bool = False
    """Whether it takes only images of the size in its configuration."""

    @property
    def class_name(self) -> str:
        """Class name of the classifier in the library."""
        return self.classifier.rpartition(".")[2]


FAMILIES = {
    "convnext": Family("convnext.modeling_convnext.ConvNextForImageClassification", _convnext),
    "convnextv2": Family("convnextv2.modeling_convnextv2.ConvNextV2ForImageClassification", _convnext),
    "deit": Family("deit.modeling_deit.DeiTForImageClassification", _vit, has_one_size=True),
    "dinov2": Family("dinov2.modeling_dinov2.Dinov2ForImageClassification", _dinov2),
    "dinov2_with_registers": Family(
        "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersForImageClassification", _dinov2
    ),
    "regnet": Family("regnet.modeling_regnet.RegNetForImageClassification", _resnet),
    "resnet": Family("resnet.modeling_resnet.ResNetForImageClassification", _resnet),
    "swin": Family("swin.modeling_swin.SwinForImageClassification", _swin),
    "vit": Family("vit.modeling_vit.ViTForImageClassification", _vit, has_one_size=True),
}
"""Architectures by `model_type` in the configuration."""
LAYOUTS = {f"transformers.models.{family.classifier}": family.layout for family in FAMILIES.values()}


def find_library() -> Any:
    """Return the transformers library. Raises UsageError if it is missing."""
    try:
        return import_whole("transformers")
    except ImportError as error:
        raise UsageError(
            f"--model {HF}NAME needs the transformers library ({error}): pip install transformers"
        ) from error


def find_folder(name: str) -> Path:
    """Return the folder of `hf:PATH_OR_NAME`; a name is looked up in the Hugging Face cache, or downloaded.

    Raises:
        UsageError: there is no such folder, it has no configuration, or the name cannot be downloaded.
    """
    bare = name.removeprefix(HF)
    folder = Path(bare).expanduser()
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(bare):
            raise UsageError(f"--model ({name}) must be {HF}FOLDER or {HF}ORGANISATION/NAME; there is no such folder")
        folder = _snapshot(name)
    if not (folder / CONFIGURATION).is_file():
        raise UsageError(f"--model ({name}): {folder} has no {CONFIGURATION}; give a folder that save_pretrained wrote")
    return folder


def _snapshot(name: str) -> Path:
    """Return the folder of a named model in the Hugging Face cache; download it if it is missing."""
    find_library()
    hub, bare = import_whole("huggingface_hub"), name.removeprefix(HF)
    try:
        cached = Path(hub.snapshot_download(bare, local_files_only=True))
        if (cached / CONFIGURATION).is_file() and any(weight_files(cached)):
            return cached
    except Exception:  # missing or incomplete: the download reports the reason
        pass
    try:
        folder = Path(hub.snapshot_download(bare, allow_patterns=["*.json", WEIGHTS[0]]))
        if not any(weight_files(folder)):
            folder = Path(hub.snapshot_download(bare, allow_patterns=["*.json", WEIGHTS[1]]))
    except Exception as error:  # the network, the disk and the hub fail in as many ways
        raise UsageError(
            f"--model ({name}) is neither a folder nor in the Hugging Face cache ({hub.constants.HF_HUB_CACHE}), and "
            f"cannot be downloaded ({type(error).__name__}); run hf download {bare} on a machine with a "
            f"network, or give its folder"
        ) from error
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder, of one format; empty if there are none."""
    return next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), [])


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError if there is none."""
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason_in_a_line(error)}; give an intact folder") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds no JSON object; give an intact folder")
    return tree


def read_architecture(name: str) -> dict[str, Any]:
    """Return the configuration of `hf:PATH_OR_NAME` without its classes, for building the network."""
    tree = read_json(find_folder(name) / CONFIGURATION)
    kind = tree.get("model_type")
    if kind not in FAMILIES:
        hint = f"; pass --model timm:{tree['architecture']}" if kind is None and "architecture" in tree else ""
        raise UsageError(
            f"--model ({name}) has the architecture {kind}; the supported architectures are {', '.join(FAMILIES)}{hint}"
        )
    return {key: value for key, value in tree.items() if key not in NOT_KEPT and not key.startswith(("_", "attn"))}


def read_processor(name: str) -> dict[str, Any]:
    """Return the configuration of the image processor of `hf:PATH_OR_NAME`, empty if there is none."""
    path = find_folder(name) / PROCESSOR
    return read_json(path) if path.is_file() else {}


def read_preparation(name: str) -> dict[str, Any]:
    """Return the settings that preprocess images like the image processor of `hf:PATH_OR_NAME`."""
    tree = read_processor(name)
    kind = str(tree.get("image_processor_type", tree.get("feature_extractor_type")))
    found: dict[str, Any] = {}
    if isinstance(resample := tree.get("resample"), int) and 0 <= resample < len(RESAMPLES):
        found["resample"] = RESAMPLES[resample]
    size, crop = tree.get("size"), _side(tree.get("crop_size")) if tree.get("do_center_crop") else None
    if not tree.get("do_resize", True) or size is None:
        return found | ({"image_size": crop} if crop else {})
    edge = size.get("shortest_edge") if isinstance(size, dict) else size if kind.startswith(BY_EDGE) else None
    side = edge if edge is not None else _side(size)
    if side is None:
        return found
    share = tree.get("crop_pct")
    if edge is not None and kind.startswith("ConvNext"):
        # It crops small images only.
        crop, side = (edge, int(edge / (share or CROP_SHARE))) if edge < WHOLE_FROM else (None, edge)
        squash = edge >= WHOLE_FROM
    else:
        squash = edge is None
    found |= {"image_size": crop or side, "fit": "squash" if squash else "crop"}
    return found | ({"resize": side} if crop is not None and crop < side else {})


def _side(size: Any) -> int | None:
    """Return the side of the squares of an image processor's size, None if it is not a square."""
    if isinstance(size, dict):
        height, width = size.get("height"), size.get("width")
        return height if height == width and isinstance(height, int) else None
    return size if isinstance(size, int) else None


def read_statistics(name: str) -> tuple[Triple, Triple] | None:
    """Return the mean and standard deviation of `hf:PATH_OR_NAME`'s normalisation, for pixels scaled to 0-1."""
    tree = read_processor(name)
    if not tree:
        return None
    scale = 255 * float(tree.get("rescale_factor", 1 / 255)) if tree.get("do_rescale", True) else 255.0
    mean, std = tree.get("image_mean"), tree.get("image_std")
    if not tree.get("do_normalize", True) or mean is None or std is None:
        mean, std = 0.0, 1.0
    return _three(mean, scale), _three(std, scale)


def _three(numbers: Any, scale: float) -> Triple:
    red, green, blue = numbers if isinstance(numbers, (list, tuple)) and len(numbers) == 3 else [numbers] * 3
    return float(red) / scale, float(green) / scale, float(blue) / scale


def processor_of(
    *, side: int, resize: int | None, fit: str, resample: str, mean: Triple, std: Triple
) -> dict[str, Any]:
    """Return the configuration of a library image processor with this preprocessing."""
    square = {"height": side, "width": side}
    size = {"height": resize or side, "width": resize or side} if fit == "squash" else {"shortest_edge": resize or side}
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size,
        "resample": RESAMPLES.index(resample),
        "do_center_crop": True,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def build_classifier(architecture: Mapping[str, Any], *, num_classes: int, image_size: int) -> nn.Module:
    """Build the network of a configuration with random float32 parameters; it returns logits alone.

    Raises:
        UsageError: the library is missing, or refuses the configuration.
    """
    library, kind = find_library(), str(architecture.get("model_type"))
    if kind not in FAMILIES:
        raise UsageError(f"the architecture {kind} is none of {', '.join(FAMILIES)}")
    size = {"image_size": image_size} if FAMILIES[kind].has_one_size else {}
    try:
        with _quiet(library):
            config = _configuration(library, {**architecture, **size}, num_classes=num_classes)
            model: nn.Module = library.AutoModelForImageClassification.from_config(config, dtype=torch.float32)
    except Exception as error:  # the library raises errors of many kinds
        raise UsageError(
            f"transformers {library.__version__} cannot build a {kind} for images of {image_size} "
            f"pixels: {reason_in_a_line(error)}; use another --image-size or another model"
        ) from error
    model.register_forward_hook(_only_logits)
    return model.train()


def _configuration(library: Any, architecture: Mapping[str, Any], *, num_classes: int) -> Any:
    settings = {key: value for key, value in architecture.items() if key != "model_type"}
    kind = architecture["model_type"]
    config = library.AutoConfig.for_model(
        kind, **settings, num_labels=num_classes, architectures=[FAMILIES[kind].class_name]
    )
    if hasattr(config, "use_mask_token"):
        # This token is used in pretraining only.
        config.use_mask_token = False
    return config


def _only_logits(model: nn.Module, inputs: Any, output: Any) -> Any:
    return getattr(output, "logits", output)


def read_pretrained(name: str) -> dict[str, Tensor]:
    """Return the weights of `hf:PATH_OR_NAME` with the names of this library version, without a head if it has none.

    Raises:
        RefusedError: there are no weights, or they are unreadable.
    """
    library, folder = find_library(), find_folder(name)
    architecture = read_architecture(name)
    labels = read_json(folder / CONFIGURATION).get("id2label") or (0, 1)
    if not weight_files(folder):
        raise RefusedError(
            f"weights (DEFAULT): {folder} holds none; use --weights none for random weights, or give a file"
        )
    try:
        with _quiet(library), torch.random.fork_rng(devices=[]):
            model, found = library.AutoModelForImageClassification.from_pretrained(
                folder,
                config=_configuration(library, architecture, num_classes=len(labels)),
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
            )
    except Exception as error:  # damaged files raise errors of many kinds
        raise RefusedError(
            f"weights (DEFAULT) of {folder} cannot be read: {reason_in_a_line(error)}; download them again, "
            f"or use --weights none"
        ) from error
    # The library filled these with random numbers.
    missing = set(found["missing_keys"])
    state: Mapping[str, Tensor] = model.state_dict()
    return {key: tensor for key, tensor in state.items() if key not in missing}


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Suppress the library's progress bars and warnings."""
    log = library.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def save(model: nn.Module, folder: Path, *, classes: Sequence[str], processor: Mapping[str, Any]) -> None:
    """Save a model of `build_classifier` as a folder for `from_pretrained` and the pipelines of transformers.

    Args:
        model: the model with its own last layer; the library has no multi-level heads.
        folder: the folder, created if missing; its files are replaced.
        classes: names in the order of the logits.
        processor: configuration of the image processor, see `processor_of`.

    Raises:
        UsageError: the model is not one of the library's.
    """
    if f"{type(model).__module__}.{type(model).__qualname__}" not in LAYOUTS:
        raise UsageError(
            f"{type(model).__name__} is not an architecture of transformers; train with --head last, or "
            f"choose another --format"
        )
    whole: Any = model
    whole.config.id2label = dict(enumerate(classes))
    whole.config.label2id = {name: number for number, name in enumerate(classes)}
    with _quiet(find_library()):
        whole.save_pretrained(folder)
    (folder / PROCESSOR).write_text(json.dumps(dict(processor), indent=2, sort_keys=True) + "\n")
