"""Trains the networks that the experiments start from: a ResNet-18 on CIFAR-100, at 32 pixels and then at 64.

    python -m analysis.backbone 32px --data-dir DIR --out resnet18-cifar100-32px-fp16.pt
    python -m analysis.backbone 64px --data-dir DIR --out resnet18-cifar100-64px-fp16.pt \
        --start resnet18-cifar100-32px-fp16.pt

One process, any machine, hours on a few cores (`--threads`); CIFAR-100 is downloaded where DIR lacks it. The file is a
state_dict in half precision of torchvision's network for 100 classes. Sums are made in another order on another machine
or with another number of threads, so that a file made there is another file and reaches about the same accuracy; those
that the kept results start from have the digests below. Their recipe is this one as far as it was written down: the
peak of the learning rate, the weight decay and the size of a batch were not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.chain.models import build_model
from hvfreeze.data.draws import shuffled
from hvfreeze.data.sets.image_set import ImageSet
from hvfreeze.data.sets.opening import open_data, prepare_data
from hvfreeze.data.views.augment import parse_augment
from hvfreeze.data.views.transform import transform_for
from hvfreeze.errors import HvfreezeError, UsageError

PEAK_LR, MOMENTUM, WEIGHT_DECAY, BATCH = 0.1, 0.9, 5e-4, 128


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one of the files is made, and what is known of the one that the kept results start from."""

    image_size: int
    epochs: int
    precision: str
    """float32, or bfloat16 (autocast)."""
    peak_lr: float
    needs_start: bool
    file: str
    sha256: str
    test_accuracy: float


RECIPES = {
    "32px": Recipe(
        image_size=32,
        epochs=20,
        precision="float32",
        peak_lr=PEAK_LR,
        needs_start=False,
        file="resnet18-cifar100-32px-fp16.pt",
        sha256="ef67f41bd00b82d6f9289f0de9a345b8d994cbe43f9f728fc5a73ab054334c9a",
        test_accuracy=0.579,
    ),
    "64px": Recipe(
        image_size=64,
        epochs=9,
        precision="bfloat16",
        peak_lr=PEAK_LR / 2,
        needs_start=True,
        file="resnet18-cifar100-64px-fp16.pt",
        sha256="9aebbbba75ff1a8273eb4354b3f8b5f7c10d40628631a5503b3960ee5a1195bc",
        test_accuracy=0.673,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the file and print its digest; return 0, or the error's exit code."""
    options = parse(arguments)
    recipe = RECIPES[options.recipe]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        if recipe.needs_start and options.start is None:
            raise UsageError(f"recipe {options.recipe} goes on from another file: name it with --start")
        weights = "none" if options.start is None else str(options.start)
        prepare_data("cifar100", options.data_dir)
        splits = open_data("cifar100", options.data_dir)
        torch.manual_seed(options.seed)
        classes = len(splits.train.classes)
        model = build_model(options.model, num_classes=classes, weights=weights, image_size=recipe.image_size).model
    except HvfreezeError as error:
        print(f"backbone: error: {error}", file=sys.stderr)
        return error.exit_code
    epochs = options.epochs or recipe.epochs
    train(model, splits.train, recipe, epochs=epochs, seed=options.seed)
    accuracy = evaluate(model, splits.test, recipe)
    digest = save(model, options.out)
    print(f"{options.out}: test accuracy {100 * accuracy:.1f} %, SHA-256 {digest}")
    print(f"the kept results start from {recipe.file}: {100 * recipe.test_accuracy:.1f} %, SHA-256 {recipe.sha256}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.backbone", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, data = parser.add_argument, os.environ.get("HVFREEZE_DATA")
    add("recipe", choices=tuple(RECIPES))
    add("--out", type=Path, required=True, help="the file to write")
    add("--start", type=Path, help="weights to go on from; 64px needs those of 32px")
    add("--data-dir", type=Path, default=Path(data) if data else None, help="where CIFAR-100 lies [$HVFREEZE_DATA]")
    add("--model", default="resnet18", help="another of torchvision's classifiers")
    add("--epochs", type=int, help="instead of the recipe's")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="of torch; default: its own choice")
    return parser.parse_args(arguments)


def train(model: nn.Module, images: ImageSet, recipe: Recipe, *, epochs: int, seed: int) -> None:
    """Train in place: SGD under a one-cycle schedule, cropped and flipped views drawn anew every epoch."""
    pixels = decoded(images)
    transform = transform_for(images, augment=parse_augment("fresh"), data_seed=seed, image_size=recipe.image_size)
    ids = np.arange(len(images))
    steps = max(1, len(ids) // BATCH)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.peak_lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=recipe.peak_lr, total_steps=epochs * steps)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for epoch in range(epochs):
        started, total = time.monotonic(), 0.0
        model.train()
        order = shuffled(ids, "backbone", seed, epoch)
        # An incomplete last batch would be another step; of fewer samples than a batch there is no other.
        for chosen in np.array_split(order[: max(steps * BATCH, min(len(ids), BATCH))], steps):
            batch = transform(pixels[chosen], ids=chosen, views=np.full(len(chosen), epoch, dtype=np.int64))
            optimizer.zero_grad(set_to_none=True)
            with autocast(recipe):
                loss = functional.cross_entropy(model(batch), images.labels[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        print(f"epoch {epoch + 1}/{epochs}: loss {total / steps:.3f}, {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def evaluate(model: nn.Module, images: ImageSet, recipe: Recipe) -> float:
    """Return the accuracy on clean images, 0-1."""
    transform = transform_for(images, augment=parse_augment("none"), data_seed=0, image_size=recipe.image_size)
    model.eval()
    right = 0
    for chosen in batches(len(images)):
        pixels = torch.from_numpy(np.stack([images.decode(int(sample)) for sample in chosen]))
        with autocast(recipe):
            right += int((model(transform.clean(pixels)).argmax(1) == images.labels[chosen]).sum())
    return right / len(images)


def decoded(images: ImageSet) -> Tensor:
    """Return all pixels, (N, C, H, W) uint8."""
    return torch.from_numpy(np.stack([images.decode(sample) for sample in range(len(images))]))


def batches(count: int) -> Iterator[np.ndarray]:
    """Yield the numbers below `count`, a batch at a time."""
    for first in range(0, count, BATCH):
        yield np.arange(first, min(first + BATCH, count))


def autocast(recipe: Recipe) -> contextlib.AbstractContextManager[object]:
    """Return the context that a forward pass is made in."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.precision == "bfloat16")


def save(model: nn.Module, path: Path) -> str:
    """Write the state_dict in half precision, complete or not at all; return the file's SHA-256."""
    state = {
        name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }
    # Into memory first: a file written by its name has that name inside, and so another digest.
    content = io.BytesIO()
    torch.save(state, content)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.getvalue())
    os.replace(part, path)
    return hashlib.sha256(content.getvalue()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
