"""Recipes from torchvision: as fixed as any other view, part of what identifies one, and cut as the evaluation is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvfreeze.config.data import parse_recipe
from hvfreeze.config.tree import from_dict
from hvfreeze.data.views import Transform, parse_augment
from hvfreeze.errors import UsageError
from hvfreeze.torchvision_shim import torchvision

IDS = np.arange(12)
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (12, 3, 24, 24), dtype=np.uint8))
PLAIN = Transform(
    data_seed=3,
    augment=parse_augment("views:4"),
    pad=0,
    flips=True,
    mean=(0.0, 0.0, 0.0),
    std=(1 / 255, 1 / 255, 1 / 255),
    image_size=16,
    cropped_to=16,
)
RECIPES = ["crop", "random-resized-crop", "trivial-augment", "color-jitter", "random-resized-crop,trivial-augment"]


def transform(recipe: str) -> Transform:
    return replace(PLAIN, recipe=parse_recipe(recipe))


def shown(of: Transform, rows: np.ndarray, view: int = 0) -> Tensor:
    return of(PIXELS[torch.from_numpy(rows)], ids=rows, views=np.full(len(rows), view))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_view_is_a_function_of_seed_sample_and_view_alone(recipe: str) -> None:
    made, before = transform(recipe), torch.get_rng_state()
    first = shown(made, IDS)
    assert torch.equal(torch.get_rng_state(), before), "the run's own generator was drawn from"
    assert first.shape == (12, 3, 16, 16) and first.dtype == torch.float32
    torch.rand(7)
    assert torch.equal(first, shown(made, IDS))
    assert torch.equal(first.flip(0), shown(made, IDS[::-1].copy()))
    assert torch.equal(first[3:5], shown(made, IDS[3:5]))
    assert not torch.equal(first, shown(made, IDS, view=1))
    assert not torch.equal(first, shown(replace(made, data_seed=4), IDS))


def test_recipes_differ_in_what_they_show_and_by_what_they_are_known() -> None:
    made = [transform(recipe) for recipe in RECIPES]
    assert len({of.identity() for of in made}) == len(RECIPES)
    views = [shown(of, IDS) for of in made]
    assert not any(torch.equal(a, b) for i, a in enumerate(views) for b in views[:i])
    assert torchvision.__version__ in made[1].identity() and torchvision.__version__ not in made[0].identity()


def test_a_clean_image_is_the_centre_as_torchvision_cuts_it() -> None:
    expected = torchvision.transforms.functional.center_crop(PIXELS, [16, 16]).float()
    torch.testing.assert_close(replace(PLAIN, augment=parse_augment("none"))(PIXELS, ids=IDS, views=IDS), expected)


def test_crops_of_larger_pixels_are_windows_of_them_without_a_border() -> None:
    windows = PIXELS.unfold(2, 16, 1).unfold(3, 16, 1).flatten(2, 3)
    for row, seen in enumerate(shown(replace(PLAIN, flips=False), IDS)):
        assert any(torch.equal(seen.round().byte(), windows[row, :, place]) for place in range(81))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "cutout"}, r"--recipe \(cutout\) must be a list out of crop, random-resized-crop"),
        ({"recipe": "crop,random-resized-crop"}, "at most one of them a crop"),
        ({"recipe": "color-jitter,color-jitter"}, "parts that differ"),
        (
            {"recipe": "color-jitter", "augment": "none"},
            "--recipe needs --augment fresh or views:K",
        ),
        ({"resize": 32}, "--resize needs --image-size"),
        ({"resize": 32, "image_size": 40}, r"--resize \(32\) must be at least --image-size \(40\)"),
        ({"mean": "0.5"}, r"--mean \(0.5\) must be given together with --std"),
        ({"mean": "0.5,0.5", "std": "1"}, r"--mean \(0.5,0.5\) must be a number, or one for each"),
        ({"mean": "0.5", "std": "0"}, r"--std \(0\) must be above 0"),
        ({"mean": "nan", "std": "1"}, "--mean"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_dict(settings)


def test_recipes_are_put_in_order_and_numbers_stand_for_all_channels() -> None:
    assert parse_recipe("color-jitter,trivial-augment") == ("crop", "trivial-augment", "color-jitter")
    data = from_dict({"mean": 0.5, "std": [0.1, 0.2, 0.3], "resize": 40, "image_size": 32}).data
    assert data.statistics() == ((0.5, 0.5, 0.5), (0.1, 0.2, 0.3)) and data.stored_size == 40
