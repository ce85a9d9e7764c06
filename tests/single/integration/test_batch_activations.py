"""Rows of a cached loader have the habits of a tensor; a transform that gets them works or fails, never half."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvfreeze
from hvfreeze.errors import UsageError
from tests.single.integration.counted_images import ROWS, SAMPLES, image_model, images, still
from tests.single.model.own_models import Text

PERMUTED = torch.tensor([2, 3, 0, 1])


def opened(model: nn.Module, data: Any, cut: int, directory: Path, **options: Any) -> hvfreeze.CachedLoader:
    loader = DataLoader(data, batch_size=ROWS)
    return hvfreeze.CachedLoader(loader, still(model, cut, **options), directory=directory)


def v2() -> Any:
    from hvfreeze.torchvision_shim import torchvision

    assert torchvision
    from torchvision.transforms import v2 as transforms

    return transforms


def cutmix(x: Any, y: Any) -> Any:
    torch.manual_seed(3)
    return v2().CutMix(num_classes=3)(x, y)


def mixup(x: Any, y: Any) -> Any:
    torch.manual_seed(3)
    return v2().MixUp(num_classes=3)(x, y)


def in_place(x: Any, y: Any) -> Any:
    """Mix as timm's Mixup does."""
    flipped = x.flip(0).mul_(0.3)
    x.mul_(0.7).add_(flipped)
    y = functional.one_hot(y, 3)
    return x, y * 0.7 + y.flip(0) * 0.3


def by_hand(x: Any, y: Any) -> Any:
    y = functional.one_hot(y, 3).float()
    return 0.6 * x + (1 - 0.6) * x[PERMUTED], 0.6 * y + 0.4 * y[PERMUTED]


def by_mask(x: Any, y: Any) -> Any:
    mask = (torch.arange(x.shape[-1]) > x.shape[-1] // 2).float()
    return mask * x + (1 - mask) * x.roll(1, 0), functional.one_hot(y, 3).float()


def where(x: Any, y: Any) -> Any:
    return torch.where(torch.rand(x.shape[1:]) > 0.5, x, x[PERMUTED]), functional.one_hot(y, 3).float()


MIXES: list[Callable[[Any, Any], Any]] = [mixup, cutmix, in_place, by_hand, by_mask, where]


@pytest.mark.parametrize("cut", [0, 2])
def test_mixes_mix_rows_and_labels_alike(cut: int, tmp_path: Path) -> None:
    """Behind the cut the mix is that of the frozen blocks' outputs, as `--mixup` does."""
    model = image_model().eval()
    cached = opened(model, images(), cut, tmp_path)
    for _, mix in itertools.product(range(2), MIXES):
        for number, (rows, labels) in enumerate(cached):
            pixels = images().inner.tensors[0][ROWS * number : ROWS * number + ROWS]
            front = model[:cut](pixels)
            torch.manual_seed(9)
            plain = mix(front.clone(), labels.clone())
            torch.manual_seed(9)
            mixed = mix(rows, labels)
            torch.testing.assert_close(cached.suffix(mixed[0]), model[cut:](plain[0]), rtol=1e-4, atol=1e-5)
            assert torch.equal(mixed[1], plain[1])
    assert (cached.rows_read > 0) == (cut > 0)
    cached.close()


OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "normalize": lambda x: v2().functional.normalize(x, [0.5] * x.shape[1], [0.2] * x.shape[1]),
    "flip": lambda x: x.flip(-1),
    "flip of torchvision": lambda x: v2().RandomHorizontalFlip(1.0)(x),
    "some are flipped": lambda x: torch.where(
        torch.tensor([True, False, True, False])[:, None, None, None], x.flip(3), x
    ),
    "noise": lambda x: x + 0.1 * torch.randn(x.shape),
    "scale": lambda x: 0.9 * x,
    "erase": lambda x: v2().functional.erase(x, 1, 1, 2, 2, torch.zeros(1)),
    "crop": lambda x: x[:, :, 1:-1, 1:-1],
    "mixed with too much": lambda x: 0.7 * x + 0.7 * x.flip(0),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "channels": lambda x: x[:, [2, 1, 0]],
    "sum over rows": lambda x: x.sum(0, keepdim=True),
}


@pytest.mark.parametrize("cut", [0, 1])
def test_what_changes_rows_otherwise_or_goes_around_the_suffix_is_refused(cut: int, tmp_path: Path) -> None:
    model = image_model()
    cached = opened(model, images(), cut, tmp_path)
    for change in OTHERWISE.values():
        rows, _ = next(iter(cached))
        with pytest.raises(UsageError, match=r"transform the images in the data set"):
            cached.suffix(change(rows))
    rows, _ = next(iter(cached))
    with pytest.raises(UsageError, match=r"call loader.suffix\(rows\)"):
        model[cut:](rows)
    with pytest.raises(UsageError, match=r"takes rows from a batch of a CachedLoader"):
        cached.suffix(torch.zeros(4, 3, 8, 8))  # type: ignore[arg-type]
    cached.close()


@pytest.mark.parametrize("cut", [0, 1])
def test_rows_have_the_habits_of_a_tensor(cut: int, tmp_path: Path) -> None:
    model = image_model().eval()
    cached = opened(model, images(), cut, tmp_path)
    rows, _ = next(iter(cached))
    assert rows.size(0) == rows.shape[0] == len(rows) == ROWS and rows.dim() == rows.ndim == 4
    assert rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.numel() == ROWS * rows[0].numel()
    assert isinstance(rows, Tensor) and torch.is_tensor(rows) and not rows.requires_grad and rows.is_floating_point()
    assert (rows.cut, rows.tensor is None) == (cut, cut == 0) and repr(rows).startswith("tensor(")
    whole = cached.suffix(rows)
    assert torch.equal(whole, model(images().inner.tensors[0][:ROWS]))
    moved = rows.to("cpu", non_blocking=True).to(torch.float32).contiguous().clone().detach().data
    # A processor may add up in another order where the channels come last.
    torch.testing.assert_close(cached.suffix(moved.to(memory_format=torch.channels_last)), whole)
    torch.testing.assert_close(cached.suffix(rows[:2]), whole[:2])
    torch.testing.assert_close(cached.suffix(rows[PERMUTED]), whole[PERMUTED])
    torch.testing.assert_close(cached.suffix(rows[torch.tensor([True, False, False, True])]), whole[[0, 3]])
    torch.testing.assert_close(torch.cat([cached.suffix(part) for part in rows.split(2)]), whole)
    torch.testing.assert_close(torch.cat([cached.suffix(part) for part in rows.chunk(3)]), whole)
    torch.testing.assert_close(cached.suffix(torch.cat([rows[2:], rows[:2]])), whole[PERMUTED])
    torch.testing.assert_close(torch.cat([cached.suffix(row[None]) for row in rows]), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(cached.suffix(rows.bfloat16()).float(), whole, rtol=0.1, atol=0.1)
    cached.close()


def test_the_loader_has_the_attributes_of_the_one_that_it_wraps(tmp_path: Path) -> None:
    cached = opened(image_model(), images(), 1, tmp_path)
    assert (cached.batch_size, len(cached.dataset), cached.num_workers, cached.drop_last) == (ROWS, SAMPLES, 0, False)
    assert cached.sampler is cached.loader.sampler and cached.batch_sampler is cached.loader.batch_sampler
    with pytest.raises(AttributeError, match="nothing_like_it"):
        cached.nothing_like_it  # noqa: B018


@pytest.mark.parametrize("cut", [0, 2])
def test_rows_are_chosen_with_the_other_inputs_of_their_samples_and_not_mixed(cut: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = Text().eval(), torch.randint(0, 20, (SAMPLES, 6))
    data = TensorDataset(ids, ids.cumsum(1) > 60, ids.sum(1) % 3)
    cached = opened(model, data, cut, tmp_path, example=(ids[:2], ids[:2].cumsum(1) > 60))
    rows, _ = next(iter(cached))
    whole = model(*data[:ROWS][:2])
    torch.testing.assert_close(cached.suffix(rows), whole)
    for choose in (lambda x: x[1:3], lambda x: x[PERMUTED], lambda x: x.flip(0), lambda x: x.roll(1, 0)):
        torch.testing.assert_close(cached.suffix(choose(rows)), choose(whole))
    for mix in (lambda x: 0.5 * x + 0.5 * x.flip(0), lambda x: torch.where(torch.rand(x.shape) > 0.5, x, x.flip(0))):
        with pytest.raises(UsageError, match=r"suffix\(\) (needs unmixed|takes) rows"):
            cached.suffix(mix(rows))
    cached.close()


@pytest.mark.seldom
def test_a_compiled_step_takes_rows_and_mixes_them(tmp_path: Path) -> None:
    cached = opened(image_model().eval(), images(), 1, tmp_path)
    rows, _ = next(iter(cached))

    def step(rows: Any) -> Any:
        return cached.suffix(0.3 * rows + 0.7 * rows.flip(0))

    compiled = torch.compile(step, backend="eager")
    torch.testing.assert_close(compiled(rows), step(rows))
    with pytest.raises(UsageError, match="transform the images in the data set"):
        torch.compile(lambda rows: cached.suffix((rows - 0.5) / 0.2), backend="eager")(rows)
    cached.close()
