"""Any module in blocks: as a chain where it is one, else watched."""

from __future__ import annotations

from torch import Tensor, nn

from hvfreeze.chain.blocks import Chain, cut_into_blocks
from hvfreeze.chain.families import layout_of
from hvfreeze.chain.watched.blocks import blocks_of
from hvfreeze.chain.watched.calls import Inputs
from hvfreeze.errors import UsageError

SCHEMES = ("stage", "residual", "paper")


def in_blocks(model: nn.Module, *, blocks: str | None = None, example: Inputs | None = None) -> Chain:
    """Return `model` in blocks: a chain where its parts run one after another, else a `WatchedChain`.

    Args:
        model: any module.
        blocks: `stage` or `residual`, or NAME,NAME,...: submodules that start a block, in forward order. None: the
            stages of a torchvision classifier or of an nn.Sequential; of any other module, what it calls.
        example: a batch of the model's inputs: a tensor, a tuple for `model(*inputs)` or a dict for `model(**inputs)`.
            Needed for any other module unless `blocks` names its blocks. The model is run on it in evaluation mode.

    Raises:
        UsageError: the model cannot be divided so; see `cut_into_blocks` and `blocks_of`.
    """
    layout = layout_of(model) if _has_layout(model) else None
    if layout is not None and layout.verified:
        return cut_into_blocks(model, scheme=blocks or "stage")
    if layout is not None and isinstance(example, Tensor):
        try:
            chain = cut_into_blocks(model, scheme=blocks or "stage", example=example)
        except UsageError:
            pass  # its forward pass does more than to run its children; it is watched
        else:
            if len(chain.blocks) > 1:
                return chain
    return blocks_of(model, scheme=None if blocks in SCHEMES else blocks, example=example)


def _has_layout(model: nn.Module) -> bool:
    """Tell whether `layout_of` has one; auxiliary heads of a torchvision classifier are refused by it."""
    return any(True for child in model.children() for _ in child.parameters())
