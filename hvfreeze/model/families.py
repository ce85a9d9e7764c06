"""The forward pass of each classification family as steps, written after the family's `forward`.

Steps have the names of modules. Stages begin where the resolution changes, or are the family's own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.errors import UsageError
from hvfreeze.model.hugging_face import LAYOUTS
from hvfreeze.model.steps import Call, Layout, Step, children_layout, classifier_layout, make_step, sequence, split_step
from hvfreeze.model.tiny_lm import EMBEDDING


def layout_of(model: nn.Module) -> Layout:
    """Return the steps of `model`: those of its family for a library's classifier, else its children.

    Raises:
        UsageError: the model has auxiliary heads, or no child with parameters.
    """
    # By exact class: a subclass may have another forward pass, and counts as a custom module.
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return FAMILIES.get(kind, children_layout)(model)


def _after_pools(steps: Sequence[Step]) -> list[str]:
    return [step.name for before, step in pairwise(steps) if isinstance(before.calls[-1], nn.MaxPool2d)]


def _children_of(model: nn.Module, name: str) -> list[str]:
    return [f"{name}.{child}" for child, _ in model.get_submodule(name).named_children()]


def _flatten(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


def _pool(x: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(x, (1, 1))


def _mean(x: Tensor) -> Tensor:
    return x.mean([2, 3])


def _first_token(x: Tensor) -> Tensor:
    return x[:, 0]


def _append(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x, layer(x)], 1)


def _embed(model: nn.Module, x: Tensor) -> Tensor:
    x = model.get_submodule("conv_proj")(x).flatten(2).permute(0, 2, 1)
    token = model.get_parameter("class_token").expand(x.shape[0], -1, -1)
    x = torch.cat([token, x], dim=1) + model.get_parameter("encoder.pos_embedding")
    embedded: Tensor = model.get_submodule("encoder.dropout")(x)
    return embedded


def _alexnet(model: nn.Module) -> Layout:
    return _with_hidden_layers(
        model, {"classifier.1": "avgpool", "classifier.4": "classifier.3", "head": "classifier.6"}
    )


def _vgg(model: nn.Module) -> Layout:
    return _with_hidden_layers(
        model, {"classifier.0": "avgpool", "classifier.3": "classifier.2", "head": "classifier.5"}
    )


def _with_hidden_layers(model: nn.Module, blocks: Mapping[str, str]) -> Layout:
    body = sequence(model, "features")
    tail = [make_step(model, "avgpool", _flatten), *sequence(model, "classifier")]
    return classifier_layout(model, body, tail, stages=_after_pools(body), tail_blocks=blocks)


def _resnet(model: nn.Module) -> Layout:
    stages = ["layer1", "layer2", "layer3", "layer4"]
    body = [make_step(model, "conv1"), make_step(model, "bn1", "relu"), make_step(model, "maxpool")]
    body += [split_step(model, name) for name in stages]
    tail = [make_step(model, "avgpool", _flatten), make_step(model, "fc")]
    layout = classifier_layout(model, body, tail, stages=stages, joined=["bn1"])
    after_stem = {name: start for name, start in layout.schemes["stage"].items() if name != "stem"}
    return replace(layout, schemes={**layout.schemes, "paper": {"conv1": "conv1", "bn1": "bn1", **after_stem}})


def _narrow_resnet(model: nn.Module) -> Layout:
    stages = ["layer1", "layer2", "layer3"]
    body = [make_step(model, "conv1"), make_step(model, "bn1", "relu"), *[split_step(model, name) for name in stages]]
    tail = [make_step(model, "avgpool", _flatten), make_step(model, "fc")]
    return classifier_layout(model, body, tail, stages=stages, joined=["bn1"])


def _mlp(model: nn.Module) -> Layout:
    return replace(children_layout(model), verified=True)


def _tiny_lm(model: nn.Module) -> Layout:
    layers = _children_of(model, "layers")
    body = [make_step(model, name) for name in ("embedding", *layers)]
    output: Any = model.output
    layout = classifier_layout(model, body, [make_step(model, "norm", output)], stages=layers)
    return replace(layout, tied=(EMBEDDING,))


def _densenet(model: nn.Module) -> Layout:
    body = [make_step(model, "features.conv0", "features.norm0", "features.relu0")]
    for name in _children_of(model, "features"):
        if "denseblock" in name:
            layers = _children_of(model, name)
            parts = [make_step(model, partial(_append, model.get_submodule(n)), name=n, owns=[n]) for n in layers]
            body.append(replace(make_step(model, name), parts=tuple(parts)))
        elif "pool" in name or "transition" in name:
            body.append(make_step(model, name))
    body.append(make_step(model, "features.norm5", functional.relu))
    tail = [make_step(model, _pool, _flatten, "classifier")]
    stages = [step.name for step in body if step.parts]
    return classifier_layout(model, body, tail, stages=stages, joined=["features.norm5"])


def _mobilenet_v2(model: nn.Module) -> Layout:
    body = sequence(model, "features")
    return classifier_layout(model, body, [make_step(model, _pool, _flatten, "classifier")], stages=_shrinking(body))


def _mobilenet_v3(model: nn.Module) -> Layout:
    body = sequence(model, "features")
    tail = [make_step(model, "avgpool", _flatten), make_step(model, "classifier")]
    return classifier_layout(model, body, tail, stages=_shrinking(body))


def _shrinking(body: Sequence[Step]) -> list[str]:
    """Return the steps after the first that hold a convolution with stride, and the last step (a wide convolution)."""
    stages = []
    for step in body[1:]:
        layers = [layer for call in step.calls if isinstance(call, nn.Module) for layer in call.modules()]
        if step is body[-1] or any(max(layer.stride) > 1 for layer in layers if isinstance(layer, nn.Conv2d)):
            stages.append(step.name)
    return stages


def _mnasnet(model: nn.Module) -> Layout:
    body = sequence(model, "layers")
    # Steps layers.0, .3 and .6 (a convolution and a separable one) make the stem.
    return classifier_layout(model, body, [make_step(model, _mean, "classifier")], stages=[s.name for s in body[3:]])


def _efficientnet(model: nn.Module) -> Layout:
    body = sequence(model, "features")
    # The classifier starts with an in-place dropout: no block may start there.
    tail = [make_step(model, "avgpool", _flatten, "classifier")]
    return classifier_layout(model, body, tail, stages=[step.name for step in body[1:]])


def _convnext(model: nn.Module) -> Layout:
    body = sequence(model, "features")
    tail = [make_step(model, "avgpool"), make_step(model, "classifier")]
    return classifier_layout(model, body, tail, stages=[step.name for step in (body[1], *body[2::2])])


def _regnet(model: nn.Module) -> Layout:
    stages = _children_of(model, "trunk_output")
    body = [make_step(model, "stem"), *[split_step(model, name) for name in stages]]
    tail = [make_step(model, "avgpool", _flatten), make_step(model, "fc")]
    return classifier_layout(model, body, tail, stages=stages)


def _squeezenet(model: nn.Module) -> Layout:
    body = sequence(model, "features")
    return classifier_layout(model, body, [make_step(model, "classifier", _flatten)], stages=_after_pools(body))


def _shufflenet(model: nn.Module) -> Layout:
    stages = ["stage2", "stage3", "stage4"]
    body = [make_step(model, "conv1"), make_step(model, "maxpool"), *[split_step(model, name) for name in stages]]
    body.append(make_step(model, "conv5"))
    return classifier_layout(model, body, [make_step(model, _mean, "fc")], stages=[*stages, "conv5"])


def _vision_transformer(model: nn.Module) -> Layout:
    owns = ["conv_proj", "class_token", "encoder.pos_embedding", "encoder.dropout"]
    layers = split_step(model, "encoder.layers")
    body = [make_step(model, partial(_embed, model), name="conv_proj", owns=owns), layers]
    tail = [make_step(model, "encoder.ln", _first_token), make_step(model, "heads")]
    quarter = max(1, len(layers.parts) // 4)
    return classifier_layout(model, body, tail, stages=[layer.name for layer in layers.parts[::quarter]])


def _timm_transformer(model: Any) -> Layout:
    owns = [name for name, _ in model.named_parameters(recurse=False)]
    owns += ["patch_embed", "pos_drop", "patch_drop", "norm_pre"]
    calls = (model.patch_embed, model._pos_embed, model.patch_drop, model.norm_pre)
    layers = split_step(model, "blocks")
    body = [Step("patch_embed", calls, tuple(owns)), layers]
    tail = [Step("norm", (model.norm, model.forward_head), ("norm", "attn_pool", "fc_norm", "head_drop", "head"))]
    quarter = max(1, len(layers.parts) // 4)
    return classifier_layout(model, body, tail, stages=[layer.name for layer in layers.parts[::quarter]])


def _swin(model: nn.Module) -> Layout:
    body = sequence(model, "features")
    tail = [make_step(model, "norm", "permute", "avgpool", "flatten"), make_step(model, "head")]
    return classifier_layout(model, body, tail, stages=[step.name for step in (body[1], *body[2::2])])


def _maxvit(model: nn.Module) -> Layout:
    stages = _children_of(model, "blocks")
    body = [make_step(model, "stem"), *[split_step(model, name, layers="layers") for name in stages]]
    return classifier_layout(model, body, [make_step(model, "classifier")], stages=stages)


def _googlenet(model: nn.Module) -> Layout:
    tail = [make_step(model, "avgpool", _flatten), make_step(model, "dropout", "fc", name="fc")]
    return _inception(model, tail, stages=["inception3a", "inception4a", "inception5a"])


def _inception_v3(model: nn.Module) -> Layout:
    tail = [make_step(model, "avgpool"), make_step(model, "dropout", _flatten, "fc", name="fc")]
    return _inception(model, tail, stages=["Mixed_5b", "Mixed_6a", "Mixed_7a"])


def _inception(model: nn.Module, tail: Sequence[Step], *, stages: Sequence[str]) -> Layout:
    children = [name for name, _ in model.named_children()]
    auxiliary = [name for name in children if name.lower().startswith("aux")]
    if auxiliary:
        raise UsageError(
            f"model ({type(model).__name__}) has auxiliary heads ({', '.join(auxiliary)}), so its "
            f"forward pass is not a chain; construct it with aux_logits=False"
        )
    body = [make_step(model, name) for name in children if name not in {"avgpool", "dropout", "fc"}]
    rescale: Call = model._transform_input  # type: ignore[assignment]
    body[0] = replace(body[0], calls=(rescale, *body[0].calls))
    return classifier_layout(model, body, tail, stages=stages)


FAMILIES: Mapping[str, Callable[[Any], Layout]] = {
    **LAYOUTS,
    "hvfreeze.model.mlp.Mlp": _mlp,
    "hvfreeze.model.narrow_resnets.NarrowResNet": _narrow_resnet,
    "hvfreeze.model.tiny_lm.TinyLM": _tiny_lm,
    "timm.models.vision_transformer.VisionTransformer": _timm_transformer,
    "torchvision.models.alexnet.AlexNet": _alexnet,
    "torchvision.models.convnext.ConvNeXt": _convnext,
    "torchvision.models.densenet.DenseNet": _densenet,
    "torchvision.models.efficientnet.EfficientNet": _efficientnet,
    "torchvision.models.googlenet.GoogLeNet": _googlenet,
    "torchvision.models.inception.Inception3": _inception_v3,
    "torchvision.models.maxvit.MaxVit": _maxvit,
    "torchvision.models.mnasnet.MNASNet": _mnasnet,
    "torchvision.models.mobilenetv2.MobileNetV2": _mobilenet_v2,
    "torchvision.models.mobilenetv3.MobileNetV3": _mobilenet_v3,
    "torchvision.models.regnet.RegNet": _regnet,
    "torchvision.models.resnet.ResNet": _resnet,
    "torchvision.models.shufflenetv2.ShuffleNetV2": _shufflenet,
    "torchvision.models.squeezenet.SqueezeNet": _squeezenet,
    "torchvision.models.swin_transformer.SwinTransformer": _swin,
    "torchvision.models.vgg.VGG": _vgg,
    "torchvision.models.vision_transformer.VisionTransformer": _vision_transformer,
}
