"""Find the channel dimension of a block's maps and tokens.

(B, C, H, W) or (B, H, W, C); (B, T, C) or (B, C, T).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hvfreeze.errors import UsageError
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation

Shape = tuple[int, ...]


def channels_last(chain: Chain, stops: Sequence[int], *, example: Tensor) -> tuple[bool | None, ...]:
    """Return whether the output after each of `stops` blocks is a map with channels last; None if it is not a map.

    For square images a map's height and width are equal. If that is ambiguous, and for other images, the model also
    runs on images of twice the height, which leaves the number of channels unchanged.

    Args:
        chain: a model in blocks.
        stops: numbers of blocks, ascending.
        example: images, (B, C, H, W); only their shape is used. Other inputs have no maps.

    Raises:
        UsageError: the layout of a map is ambiguous; names its block.
    """
    if example.dim() != 4:
        return (None,) * len(stops)
    shapes = shapes_of(chain, stops, example[:1])
    sides = [_by_sides(shape) for shape in shapes]
    square = example.shape[2] == example.shape[3]
    unclear = [len(shape) == 4 and (last is None or not square) for shape, last in zip(shapes, sides)]
    if not any(unclear):
        return tuple(sides)
    known = sides
    # A model may refuse other image sizes with any error.
    with suppress(Exception):
        grown = map(_by_growth, shapes, shapes_of(chain, stops, _taller(example)))
        known = [sure if last is None or not odd else last for odd, sure, last in zip(unclear, sides, grown)]
    for stop, odd, last, shape in zip(stops, unclear, known, shapes):
        if odd and last is None:
            raise UsageError(
                f"block {chain.blocks[stop - 1].name} of {type(chain.model).__name__} returns a tensor "
                f"of shape {shape} with an unknown channel dimension; use other --blocks, or --head last"
            )
    return tuple(known)


def tokens_last(chain: Chain, stops: Sequence[int], *, example: Tensor) -> tuple[bool, ...]:
    """Return whether the output after each of `stops` blocks are tokens as (B, C, T).

    Images of twice the height have more tokens and the same channels. If the model refuses them, tokens are (B, T, C),
    as in transformers. For the arguments see `channels_last`.
    """
    usual = (False,) * len(stops)
    if example.dim() != 4:
        return usual
    shapes = shapes_of(chain, stops, example[:1])
    if all(len(shape) != 3 for shape in shapes):
        return usual
    with suppress(Exception):
        taller = shapes_of(chain, stops, _taller(example))
        return tuple(
            len(shape) == 3 and shape[1] == grown[1] and shape[2] != grown[2] for shape, grown in zip(shapes, taller)
        )
    return usual


def _taller(example: Tensor) -> Tensor:
    return torch.zeros(1, example.shape[1], 2 * example.shape[2], example.shape[3], dtype=example.dtype)


def shapes_of(chain: Chain, stops: Sequence[int], images: Tensor) -> list[Shape]:
    """Return the shape of the output after each of `stops` blocks, in evaluation mode."""
    shapes, first = [], 0
    with torch.no_grad(), in_evaluation(chain.model):
        for stop in stops:
            images = chain.run(images, first, stop)
            shapes.append(tuple(images.shape))
            first = stop
    return shapes


def _by_sides(shape: Shape) -> bool | None:
    """Return whether a map of square images has its channels last, None if its shape is ambiguous."""
    if len(shape) != 4:
        return None
    first, last = shape[2] == shape[3], shape[1] == shape[2]
    return last if first != last else None


def _by_growth(shape: Shape, taller: Shape) -> bool | None:
    """Return whether a map has its channels last, by its shape for taller images."""
    grown = [place for place in range(1, len(shape)) if shape[place] != taller[place]]
    return {2: False, 1: True}[grown[0]] if grown in ([2], [1]) else None
