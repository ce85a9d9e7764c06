"""`hvfreeze blocks`: the cuts of a model, with frozen parameters, cache size and step time on this machine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hvfreeze.config.data import MOST_PIXELS
from hvfreeze.config.model import TINY_LM
from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import build_model, set_memory_formats
from hvfreeze.report.tables import Table, factor, percent, table_of
from hvfreeze.rules import rule
from hvfreeze.runs.files import reason_of
from hvfreeze.timing import min_seconds
from hvfreeze.wording import plural

MOST = torch.iinfo(torch.int32).max
"""Largest number of classes or images; with more, torch cannot index the elements of a tensor."""


def show_blocks(model: str, *, scheme: str, image_size: int, classes: int, batch_size: int) -> int:
    """Print a row for each cut of a model with random parameters, and return exit code 0.

    Raises:
        UsageError: there is no such model, it has no such blocks, or a number is invalid.
    """
    numbers = (("image-size", image_size, MOST_PIXELS), ("classes", classes, MOST), ("batch-size", batch_size, MOST))
    for flag, value, most in numbers:
        rule(1 <= value <= most, flag, value, f"in 1..{most}")
    if model == TINY_LM:
        raise UsageError(
            f"model ({model}) reads text: its first and last block share parameters, so no block can be frozen"
        )
    try:
        images = torch.rand(batch_size, 3, image_size, image_size).contiguous(memory_format=torch.channels_last)
        shape = (3, image_size, image_size)
        built = set_memory_formats(build_model(model, num_classes=classes, image_size=image_size), shape)
        chain = built.in_blocks(scheme=scheme, example=torch.rand(2, *shape) if ":" in model else None)
        table = outline(chain, images)
    except ValueError as error:
        # BatchNorm has no statistics for one value per channel.
        raise UsageError(
            f"--batch-size ({batch_size}) is too small for {model} and --image-size ({image_size}): "
            f"{reason_of(error)}; use a larger one"
        ) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise UsageError(
            f"--batch-size ({batch_size}), --image-size ({image_size}) or --classes ({classes}) is too "
            f"large for {model} in the memory of this machine; use a smaller one"
        ) from error
    print(f"{model}, {plural(len(chain.blocks), 'block')} ({scheme}), {image_size}x{image_size} pixels")
    print(table.to_text(), end="")
    print(
        f"times: a batch of {batch_size}, {plural(torch.get_num_threads(), 'thread')}, minimum of a "
        f"few runs; prefix: forward; rest: forward and backward; cached: speed-up over cut 0 if "
        f"only the rest runs"
    )
    return 0


def outline(chain: Chain, images: Tensor) -> Table:
    """Return a row for each cut, from no frozen block to all but the last."""
    chain.model.train()
    sizes = [
        sum(parameter.numel() for _, parameter in chain.named_parameters(b, b + 1)) for b in range(len(chain.blocks))
    ]
    rows, whole, x, prefix = [], 0.0, images, 0.0
    for cut in range(len(chain.blocks)):
        rest = min_seconds(lambda cut=cut, x=x: step(chain, x, cut))  # type: ignore[misc]
        whole = whole or rest
        frozen = sum(sizes[:cut])
        rows.append(
            {
                "Cut": str(cut),
                "Frozen up to": chain.blocks[cut - 1].name if cut else "-",
                "Parameters": f"{frozen:,}",
                "Of all": percent(frozen / max(1, sum(sizes))),
                "Row per image": f"{x[0].numel() * x.element_size() / 1000:.1f} kB",
                "Prefix": f"{1000 * prefix:.1f} ms",
                "Rest of a step": f"{1000 * rest:.1f} ms",
                "Step, cached": factor(whole / rest),
            }
        )
        if cut + 1 < len(chain.blocks):
            prefix += min_seconds(lambda cut=cut, x=x: forward(chain, x, cut))  # type: ignore[misc]
            x = forward(chain, x, cut)
    return table_of(rows, prose=("Frozen up to",))


def step(chain: Chain, x: Tensor, cut: int) -> None:
    """Run the blocks from `cut` forward and backward."""
    chain.model.zero_grad()
    logits = chain.run(x, cut, len(chain.blocks))
    functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64)).backward()


@torch.no_grad()
def forward(chain: Chain, x: Tensor, block: int) -> Tensor:
    """Return the output of one block, which is frozen."""
    for module in chain.modules(block, block + 1):
        module.eval()
    return chain.run(x, block, block + 1)
