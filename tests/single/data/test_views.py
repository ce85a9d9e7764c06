"""Views: determined by data seed, sample and view alone, made of real shifts and mirrors, each seen in K epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvfreeze.data.data_sets import open_data
from hvfreeze.data.views import MIRRORED, Transform, parse_augment, transform_for
from hvfreeze.errors import UsageError

SEED = 11
IDS = np.random.default_rng(1).permutation(1000)[:40]
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (1000, 3, 16, 16), dtype=np.uint8))
PLAIN = Transform(
    data_seed=SEED,
    augment=parse_augment("fresh"),
    pad=2,
    flips=True,
    mean=(0.0, 0.0, 0.0),
    std=(1 / 255, 1 / 255, 1 / 255),
    image_size=None,
)


def shown(transform: Transform, ids: np.ndarray, views: np.ndarray) -> Tensor:
    return transform(PIXELS[torch.from_numpy(ids)], ids=ids, views=views)


def shifts_of(sample: int, view: int) -> tuple[int, int, bool]:
    """Finds by search the crop and flip that lead to a view, and that there is exactly one."""
    seen = shown(PLAIN, np.array([sample]), np.array([view]))[0].to(torch.uint8)
    padded = torch.nn.functional.pad(PIXELS[sample], (2, 2, 2, 2))
    found = [
        (top, left, flip)
        for top in range(5)
        for left in range(5)
        for flip in (False, True)
        if torch.equal(seen, padded[:, top : top + 16, left : left + 16].flip(-1 if flip else ()))
    ]
    assert len(found) == 1
    return found[0]


def test_mirrored_shows_the_sample_and_its_mirror_image_uncropped() -> None:
    transform = replace(PLAIN, augment=MIRRORED)
    views = np.arange(len(IDS)) % 2
    expected = PIXELS[torch.from_numpy(IDS)].float()
    expected[1::2] = expected[1::2].flip(3)
    torch.testing.assert_close(shown(transform, IDS, views), expected)
    assert str(MIRRORED) == "mirrored" != str(parse_augment("none"))
    assert transform.identity() != replace(PLAIN, augment=parse_augment("none")).identity()


@pytest.mark.parametrize("image_size", [None, 16, 40])
def test_a_view_does_not_depend_on_batch_order_or_epoch_company(image_size: int | None) -> None:
    transform = replace(PLAIN, image_size=image_size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    views = np.arange(len(IDS)) % 5
    together = shown(transform, IDS, views)
    backwards = shown(transform, IDS[::-1].copy(), views[::-1].copy())
    assert torch.equal(together, backwards.flip(0))
    for batch in (1, 3, 7):
        parts = [shown(transform, IDS[i : i + batch], views[i : i + batch]) for i in range(0, len(IDS), batch)]
        assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("change", [{"data_seed": SEED + 1}, {"ids": IDS[::-1].copy()}, {"views": 3}])
def test_seed_sample_and_view_each_change_the_draw(change: dict[str, Any]) -> None:
    pixels = PIXELS[:1].expand(len(IDS), -1, -1, -1)
    transform = replace(PLAIN, data_seed=change.get("data_seed", SEED))
    views = np.full(len(IDS), change.get("views", 1))
    other = transform(pixels, ids=change.get("ids", IDS), views=views)
    first = PLAIN(pixels, ids=IDS, views=np.full(len(IDS), 1))
    assert sum(torch.equal(a, b) for a, b in zip(first, other, strict=True)) < len(IDS) / 4


def test_views_are_crops_out_of_a_black_border_and_all_crops_occur() -> None:
    drawn = {shifts_of(sample, view)[:2] for sample in range(40) for view in range(5)}
    assert drawn == {(top, left) for top in range(5) for left in range(5)}


def test_consecutive_views_alternate_sides_and_samples_start_on_either() -> None:
    first = [shifts_of(sample, 0)[2] for sample in range(60)]
    assert 15 < sum(first) < 45
    for sample in range(20):
        assert [shifts_of(sample, view)[2] ^ first[sample] for view in range(4)] == [False, True, False, True]


def test_sets_that_must_not_be_mirrored_are_shifted_only() -> None:
    transform = replace(PLAIN, flips=False)
    pixels = torch.arange(1, 17, dtype=torch.uint8).expand(len(IDS), 3, 16, 16)
    rows = transform(pixels, ids=IDS, views=IDS)[:, 0, 8, 2:14]
    assert bool((rows.diff(dim=1) > 0).all())


@pytest.mark.parametrize("num_views", [1, 2, 3, 7])
def test_in_every_k_epochs_each_sample_shows_each_view_once(num_views: int) -> None:
    augment = parse_augment(f"views:{num_views}")
    for start in (0, 5):
        table = np.stack([augment.view_of(IDS, epoch=start + e, data_seed=SEED) for e in range(num_views)])
        np.testing.assert_array_equal(np.sort(table, axis=0), np.arange(num_views)[:, None].repeat(len(IDS), axis=1))


def test_an_epoch_mixes_the_views_and_the_offset_is_the_samples_own() -> None:
    augment = parse_augment("views:4")
    views = augment.view_of(np.arange(1000), epoch=3, data_seed=SEED)
    assert np.bincount(views).min() > 200
    np.testing.assert_array_equal(augment.view_of(np.arange(1000)[::-3], epoch=3, data_seed=SEED), views[::-3])
    assert (augment.view_of(np.arange(1000), epoch=3, data_seed=SEED + 1) != views).any()


def test_fresh_shows_the_view_of_its_epoch_and_none_shows_one_unchanged_image() -> None:
    assert set(parse_augment("fresh").view_of(IDS, epoch=9, data_seed=SEED)) == {9}
    none = parse_augment("none")
    assert set(none.view_of(IDS, epoch=9, data_seed=SEED)) == {0}
    unchanged = shown(replace(PLAIN, augment=none), IDS, np.zeros_like(IDS))
    assert torch.equal(unchanged.to(torch.uint8), PIXELS[torch.from_numpy(IDS)])


def test_clean_is_the_textbook_normalisation_and_leaves_its_input_alone() -> None:
    splits = open_data("digits")
    transform = transform_for(splits.train, augment=parse_augment("fresh"), data_seed=0, image_size=None)
    pixels = torch.from_numpy(np.stack([splits.train.decode(i) for i in range(len(splits.train))]))
    before = pixels.clone()
    batch = transform.clean(pixels)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (splits.train.mean, splits.train.std))
    torch.testing.assert_close(batch, (pixels.to(torch.float32) / 255 - mean) / std)
    assert abs(float(batch.mean())) < 0.01
    assert abs(float(batch.std()) - 1) < 0.01
    assert torch.equal(pixels, before)


def test_smaller_pixels_are_enlarged_bilinearly_after_normalisation() -> None:
    transform = replace(PLAIN, image_size=40)
    views = np.zeros_like(IDS)
    expected = torch.nn.functional.interpolate(
        shown(PLAIN, IDS, views), size=(40, 40), mode="bilinear", align_corners=False
    )
    assert torch.equal(shown(transform, IDS, views), expected)


def test_identities_differ_when_anything_that_makes_a_view_differs() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"data_seed": 12},
        {"augment": parse_augment("none")},
        {"augment": parse_augment("views:2")},
        {"augment": parse_augment("views:3")},
        {"pad": 3},
        {"flips": False},
        {"mean": (0.1, 0.0, 0.0)},
        {"std": (1.0, 1.0, 1.0)},
        {"image_size": 32},
    ]
    identities = [replace(PLAIN, **change).identity() for change in changes]
    assert len(set(identities)) == len(changes)
    assert identities[0] == replace(PLAIN).identity()


def test_a_data_sets_transform_pads_an_eighth_of_the_side_or_crops_larger_pixels() -> None:
    digits = open_data("digits", image_size=28).train
    settings: dict[str, Any] = {"augment": parse_augment("views:2"), "data_seed": 3}
    for image_size, cropped_to, pad in ((24, 24, 0), (28, None, 3), (40, None, 3)):
        made = transform_for(digits, **settings, image_size=image_size)
        assert (made.cropped_to, made.pad, made.image_size) == (cropped_to, pad, image_size)
        assert (made.flips, made.data_seed) == (False, 3)
    assert transform_for(digits, **settings, image_size=28, statistics=((0, 0, 0), (1, 1, 1))).std == (1, 1, 1)


@pytest.mark.parametrize(("text", "num_views"), [("none", 1), ("fresh", 0), ("views:1", 1), ("views:65536", 65536)])
def test_augment_values_are_read_and_written_alike(text: str, num_views: int) -> None:
    augment = parse_augment(text)
    assert (augment.num_views, str(augment)) == (num_views, text)


@pytest.mark.parametrize("text", ["views", "views:", "views:0", "views:-1", "views:1.5", "views:65537", "flip", ""])
def test_unknown_augment_values_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(UsageError, match=r"--augment \(.*\) must be fresh, none or views:K"):
        parse_augment(text)
