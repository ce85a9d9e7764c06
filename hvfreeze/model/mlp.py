"""The multilayer perceptron: layers of Linear, BatchNorm and ReLU, as a model or as a head.

As in the program of Independent Subnet Training (Yuan et al., VLDB 2022), it has no biases, and a BatchNorm without
scale and shift after the last Linear. So activations keep their scale in layers with fewer neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from hvfreeze.config.head import parse_mlp
from hvfreeze.errors import UsageError
from hvfreeze.model.weights import head_layers


class Mlp(nn.Sequential):
    """A multilayer perceptron from `inputs` numbers per sample, (B, ...), to logits, (B, classes).

    Children are `flatten`, `hidden1` to `hiddenL` and `head`; each layer's are `linear`, `norm` and, if hidden, `relu`.

    Args:
        inputs: numbers per sample.
        widths: neurons of each hidden layer.
        classes: outputs.
    """

    def __init__(self, inputs: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.inputs, self.widths, self.classes = inputs, tuple(widths), classes
        self.add_module("flatten", nn.Flatten())
        for number, (before, width) in enumerate(pairwise([inputs, *widths]), 1):
            layer = nn.Sequential()
            layer.add_module("linear", nn.Linear(before, width, bias=False))
            layer.add_module("norm", nn.BatchNorm1d(width))
            layer.add_module("relu", nn.ReLU())
            self.add_module(f"hidden{number}", layer)
        head = nn.Sequential()
        head.add_module("linear", nn.Linear(self.widths[-1], classes, bias=False))
        head.add_module("norm", nn.BatchNorm1d(classes, affine=False))
        self.add_module("head", head)


def mlp_of(model: nn.Module) -> tuple[str, Mlp] | None:
    """Return the name and the module of the Mlp in `model`, None if there is none. The model itself has the name ""."""
    return next(((name, module) for name, module in model.named_modules() if isinstance(module, Mlp)), None)


def replace_head(model: nn.Module, head: str) -> None:
    """Replace the last Linear of `model` by a random Mlp, `mlp` or `mlp-WxW...`.

    Raises:
        UsageError: the model does not end with a Linear.
    """
    widths, layers = parse_mlp("head", head), head_layers(model)
    assert widths is not None
    path = layers[0] if layers else ""
    layer = model.get_submodule(path)
    if not isinstance(layer, nn.Linear) or mlp_of(model) is not None:
        raise UsageError(
            f"--head ({head}) replaces a last Linear layer, and {type(model).__name__} ends with "
            f"another layer; use a model such as resnet18, or --head last"
        )
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, Mlp(layer.in_features, widths, layer.out_features))
