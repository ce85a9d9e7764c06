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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.data.data_sets import ImageSet, open_data, prepare_data
from hvfreeze.data.shards import shuffled
from hvfreeze.data.views import parse_augment, transform_for
from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.model.model_sources import build_model

MOMENTUM, WEIGHT_DECAY, BATCH = 0.9, 5e-4, 128


@dataclass(frozen=True)
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


FIRST = ("resnet18-cifar100-32px-fp16.pt", "ef67f41bd00b82d6f9289f0de9a345b8d994cbe43f9f728fc5a73ab054334c9a", 0.579)
SECOND = ("resnet18-cifar100-64px-fp16.pt", "9aebbbba75ff1a8273eb4354b3f8b5f7c10d40628631a5503b3960ee5a1195bc", 0.673)
RECIPES = {
    "32px": Recipe(32, 20, "float32", 0.1, False, *FIRST),
    "64px": Recipe(64, 9, "bfloat16", 0.05, True, *SECOND),
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
    pixels = decoded(images, range(len(images)))
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
    for first in range(0, len(images), BATCH):
        chosen = range(first, min(first + BATCH, len(images)))
        with autocast(recipe):
            found = model(transform.clean(decoded(images, chosen))).argmax(1)
        right += int((found == images.labels[chosen.start : chosen.stop]).sum())
    return right / len(images)


def decoded(images: ImageSet, chosen: range) -> Tensor:
    """Return pixels, (N, C, H, W) uint8."""
    return torch.from_numpy(np.stack([images.decode(sample) for sample in chosen]))


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
