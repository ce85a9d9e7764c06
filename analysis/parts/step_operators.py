"""Where a training step's time goes, by operator: python -m analysis.parts.step_operators MODEL SIDE BATCH.

Prints JSON: the share of each kind of operator, the largest first, and the processor seconds of steps in the memory
format that `hvfreeze train` chooses and in the contiguous one, in turns. One thread, random images and weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from hvfreeze.allocator import keep_memory
from hvfreeze.model.model_sources import build_model, set_memory_formats

CLASSES, WARM_STEPS, STEPS = 10, 2, 5
CHOSEN, CONTIGUOUS = "channels_last", "contiguous"
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
}
"""Part of an operator's name -> its kind; the first that fits."""
OTHERS = "others"


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile and time a few steps, print the result, and return 0."""
    name, side, batch = arguments or sys.argv[1:]
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (int(batch), 3, int(side), int(side))
    steps = {form: step_of(name, shape, form) for form in (CHOSEN, CONTIGUOUS)}
    seconds: dict[str, list[float]] = {form: [] for form in steps}
    for number in range(WARM_STEPS + STEPS):
        for form, step in steps.items():
            start = time.process_time()
            step()
            if number >= WARM_STEPS:
                seconds[form].append(time.process_time() - start)
    print(json.dumps({"operators": operators(steps[CHOSEN]), "seconds": seconds}))
    return 0


def step_of(name: str, shape: tuple[int, int, int, int], form: str) -> Callable[[], None]:
    """Return a training step of a model in a memory format."""
    built = build_model(name, num_classes=CLASSES, weights="none", image_size=shape[-1])
    model: nn.Module = (set_memory_formats(built, shape[1:]) if form == CHOSEN else built).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images: Tensor = torch.randn(shape)
    if form == CHOSEN:
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(shape[0]) % CLASSES

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def operators(step: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the share of each kind of operator in the time of a step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            step()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        spent[kind_of(event.key, event.input_shapes)] += event.self_cpu_time_total
    whole = sum(spent.values())
    return [{"kind": kind, "share": each / whole} for kind, each in spent.most_common()]


def kind_of(operator: str, shapes: Sequence[Sequence[int]]) -> str:
    """Return the kind of an operator: of a convolution whether it is depthwise, and whether it goes backward."""
    way = " backward" if "backward" in operator else ""
    if "conv" in operator:
        # A depthwise kernel has one input channel and several outputs.
        kernels = [shape for shape in shapes if len(shape) == 4 and shape[1] == 1 and shape[0] > 1]
        return f"depthwise {kernels[0][2]}x{kernels[0][3]}{way}" if kernels else f"dense convolution{way}"
    return next((kind + way for part, kind in NAMES.items() if part in operator), OTHERS)


if __name__ == "__main__":
    sys.exit(main())
