"""Where a training step's processor time goes, by operator: python -m analysis.parts.step_operators MODEL SIDE BATCH.

Prints a JSON list, the largest first. One thread, random images and weights, as `hvfreeze train` lays them out.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from hvfreeze.allocator import keep_memory
from hvfreeze.model.model_sources import build_model, set_memory_formats

CLASSES, WARM_STEPS, STEPS = 10, 2, 3
NAMES = {
    "batch_norm": "BatchNorm",
    "layer_norm": "LayerNorm",
    "hardswish": "activation",
    "hardsigmoid": "activation",
    "hardtanh": "activation",
    "threshold": "activation",
    "relu": "activation",
    "clamp": "activation",
    "silu": "activation",
    "gelu": "activation",
    "mean": "pooling",
    "pool": "pooling",
    "copy": "copies",
    "clone": "copies",
    "addmm": "linear layer",
    "mm": "linear layer",
}
"""Part of an operator's name -> its kind; the first that fits."""
OTHERS = "others"


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile a few steps, print the kinds of operators, and return 0."""
    name, side, batch = arguments or sys.argv[1:]
    keep_memory()
    print(json.dumps(operators(name, int(side), int(batch))))
    return 0


def operators(name: str, side: int, batch: int) -> list[dict[str, Any]]:
    """Return milliseconds of a step and share of each kind of operator."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built = build_model(name, num_classes=CLASSES, weights="none", image_size=side)
    model = set_memory_formats(built, (3, side, side)).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch) % CLASSES

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            step()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        spent[kind_of(event.key, event.input_shapes)] += event.self_cpu_time_total
    whole = sum(spent.values())
    return [{"kind": kind, "ms": each / 1000 / STEPS, "share": each / whole} for kind, each in spent.most_common()]


def kind_of(operator: str, shapes: Sequence[Sequence[int]]) -> str:
    """Return the kind of an operator: of a convolution also whether it is depthwise, and whether it goes backward."""
    way = " backward" if "backward" in operator else ""
    if "conv" in operator:
        # A depthwise kernel has one input channel and several outputs.
        kernels = [shape for shape in shapes if len(shape) == 4 and shape[1] == 1 and shape[0] > 1]
        return f"{'depthwise' if kernels else 'dense'} convolution{way}"
    return next((kind + way for part, kind in NAMES.items() if part in operator), OTHERS)


if __name__ == "__main__":
    sys.exit(main())
