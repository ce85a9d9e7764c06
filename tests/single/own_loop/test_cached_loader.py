"""A cached loader gives a script the bits that its own loop computes; an image and a text model, one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import hvfreeze
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.own_loop.optimizer import DistributedOptimizer
from tests.single.chain.own_models import Text

EPOCHS, ROWS, SAMPLES = 5, 4, 16


def image_model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    rest = [nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)]
    return nn.Sequential(first, *rest)


class Glued(nn.Module):
    """An image model with glue in its forward pass: its suffix needs no images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu_(self.norm(self.first(x)))
        logits: Tensor = self.head(functional.dropout(self.second(x).relu().mean((2, 3)), 0.2, self.training))
        return logits


def text_model() -> Text:
    torch.manual_seed(0)
    return Text()


def images() -> Counting:
    generator = torch.Generator().manual_seed(1)
    pixels, labels = torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.arange(SAMPLES) % 3
    return Counting(TensorDataset(pixels, labels))


def sentences() -> Counting:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (SAMPLES, 6), generator=generator)
    return Counting(TensorDataset(ids, ids.cumsum(1) > 60, ids.sum(1) % 3))


class Counting(Dataset[Any]):
    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        LOADED.append(index)
        return self.inner[index]


class Drawing(Counting):
    """Draws a number that comes to nothing; a plain loop draws it from the loop's own random state."""

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return super().__getitem__(index)


LOADED: list[int] = []
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Counting]]] = {
    "a chain of images": (image_model, images),
    "images through glue": (Glued, images),
    "text with a mask": (text_model, sentences),
}


def batch_of(data: Dataset[Any], rows: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*(data[i] for i in range(rows))))[:-1]


def train(
    case: str,
    how: str,
    directory: Path,
    *,
    moves: dict[int, int],
    epochs: int = EPOCHS,
    rows: int = ROWS,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Train with cuts that move after the given steps; `how` is plain, computed or cached."""
    torch.manual_seed(0)
    make_model, make_data = CASES[case]
    model, data = make_model(), make_data()
    loader = DataLoader(data, batch_size=rows, shuffle=True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = DistributedOptimizer(
        adamw,
        model=model,
        example=batch_of(data) if case != "a chain of images" else None,
        steps_per_epoch=len(loader),
        num_epochs=epochs,
        settings=FreezeConfig(freeze="static", cut=0),
        world=hvfreeze.SoloWorld(),
    )
    cached: Any = None
    if how != "plain":
        cached = hvfreeze.CachedLoader(loader, optimizer, directory=directory, store=how == "cached", **options)
    model.train()
    LOADED.clear()
    torch.manual_seed(5)
    for _ in range(epochs):
        for batch in cached or loader:
            logits = cached.suffix(batch[0]) if cached else model(*batch[:-1])
            optimizer.zero_grad()
            functional.cross_entropy(logits, batch[-1]).backward()
            optimizer.step()
            if optimizer.freezer.step in moves:
                optimizer.freezer.freeze(moves[optimizer.freezer.step])
    if cached:
        cached.close()
    return model, cached


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(s, t) for (a, s), (b, t) in pairs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("moves", [{4: 1}, {3: 1, 10: 2}, {4: 2, 12: 0, 14: 1}], ids=["once", "twice", "thawed"])
def test_cached_computed_and_plain_training_have_the_same_bits(
    case: str, moves: dict[int, int], tmp_path: Path
) -> None:
    plain, _ = train(case, "plain", tmp_path, moves=moves)
    computed, without = train(case, "computed", tmp_path, moves=moves)
    cached, loader = train(case, "cached", tmp_path, moves=moves)
    assert equal(plain, computed) and equal(plain, cached)
    assert loader.rows_read > 0 and loader.exact and without.rows_read == 0


def test_what_the_data_set_draws_does_not_reach_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "drawing", (image_model, lambda: Drawing(images().inner)))
    computed, _ = train("drawing", "computed", tmp_path, moves={4: 1})
    cached, loader = train("drawing", "cached", tmp_path, moves={4: 1})
    assert equal(computed, cached) and loader.rows_read > 0


@pytest.mark.parametrize("case", CASES)
def test_samples_that_are_cached_are_not_read_again(case: str, tmp_path: Path) -> None:
    _, loader = train(case, "cached", tmp_path, moves={4: 1})
    assert len(LOADED) <= 2 * SAMPLES + 3 * ROWS, "one epoch, one sweep, and a look"
    assert loader.rows_read == 4 * SAMPLES


def test_a_later_run_computes_no_row(tmp_path: Path) -> None:
    _, first = train("a chain of images", "cached", tmp_path, moves={4: 1})
    _, again = train("a chain of images", "cached", tmp_path, moves={4: 1})
    counted = [loader._activations.counters for loader in (first, again)]
    assert [one.rows_written for one in counted] == [SAMPLES, 0]
    assert counted[1].rows_read == 4 * SAMPLES
    assert len(list(tmp_path.glob("*.h5"))) == 1


def test_a_last_batch_that_is_smaller_is_filled_up(tmp_path: Path) -> None:
    computed, _ = train("text with a mask", "computed", tmp_path, moves={4: 2}, rows=5)
    cached, loader = train("text with a mask", "cached", tmp_path, moves={4: 2}, rows=5)
    assert equal(computed, cached) and loader.rows_read > 0


def test_workers_read_what_is_missing(tmp_path: Path) -> None:
    model = image_model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        steps_per_epoch=4,
        num_epochs=3,
        settings=FreezeConfig(freeze="static", cut=1),
        world=hvfreeze.SoloWorld(),
    )
    loader = DataLoader(images(), batch_size=ROWS, num_workers=1, multiprocessing_context="fork")
    cached = hvfreeze.CachedLoader(loader, optimizer, directory=tmp_path)
    LOADED.clear()
    for _ in range(2):
        labels = [label for _, batch in cached for label in batch.tolist()]
        assert labels == [i % 3 for i in range(SAMPLES)]
    assert len(LOADED) == ROWS, "this process read more than the batch that the cut is tried with"
    cached.close()


class Noisy(Dataset[Any]):
    """Random draws of three libraries; views make them fixed."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, 8, 8) + float(np.random.rand()) + index, index % 3


def test_random_draws_are_refused_without_views_and_fixed_with_them(tmp_path: Path) -> None:
    model = image_model()

    def open_cached(**options: Any) -> hvfreeze.CachedLoader:
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model=model,
            steps_per_epoch=4,
            num_epochs=6,
            settings=FreezeConfig(freeze="static", cut=1),
            world=hvfreeze.SoloWorld(),
        )
        return hvfreeze.CachedLoader(DataLoader(Noisy(), batch_size=ROWS), optimizer, directory=tmp_path, **options)

    with pytest.raises(UsageError, match=r"gives another sample.*give views=K"):
        open_cached()
    seen: list[list[Tensor]] = []
    cached = open_cached(views=2)
    for _ in range(4):
        seen.append([batch.tensor for batch, _ in cached if batch.tensor is not None])
        for _ in range(4):
            cached._freezer.after_step(0.0)
    assert len(list(tmp_path.glob("*.h5"))) == 1 and cached.rows_read == 4 * SAMPLES
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[3], strict=True))
    assert not torch.equal(seen[0][0], seen[1][0])
    cached.close()


def marks(tmp_path: Path, **changes: Any) -> str:
    """Return the name of the file that a loader makes."""
    model = changes.get("model", image_model)()
    data = changes.get("data", images)()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        steps_per_epoch=4,
        num_epochs=3,
        settings=FreezeConfig(freeze="static", cut=changes.get("cut", 1)),
        world=hvfreeze.SoloWorld(),
    )
    loader = DataLoader(data, batch_size=ROWS)
    before = set(tmp_path.glob("*.h5"))
    cached = hvfreeze.CachedLoader(loader, optimizer, directory=tmp_path, autocast_dtype=changes.get("autocast"))
    for _ in cached:
        pass
    cached.close()
    made = set(tmp_path.glob("*.h5")) - before
    return made.pop().name if made else "none"


def test_rows_of_another_prefix_data_set_or_precision_lie_in_another_file(tmp_path: Path) -> None:
    def with_other_weights() -> nn.Module:
        model = image_model()
        with torch.no_grad():
            model[0][0].weight[0, 0, 0, 0] += 1
        return model

    def with_another_operation() -> nn.Module:
        model = image_model()
        model[0][2] = nn.LeakyReLU(0.3)
        return model

    def with_another_head() -> nn.Module:
        model = image_model()
        model[5] = nn.Linear(16, 3)
        return model

    def with_another_pixel() -> Dataset[Any]:
        data = images()
        data.inner.tensors[0][7, 0, 0, 0] += 1
        return data

    assert marks(tmp_path) != "none"
    assert marks(tmp_path) == "none" and marks(tmp_path, model=with_another_head) == "none"
    changes: list[dict[str, Any]] = [
        {"model": with_other_weights},
        {"model": with_another_operation},
        {"data": with_another_pixel},
        {"data": lambda: Subset(images(), range(8))},
        {"cut": 2},
        {"autocast": torch.bfloat16},
    ]
    assert all(marks(tmp_path, **change) != "none" for change in changes)


class Skipping(nn.Module):
    """The input reaches around the first layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.how, self.dropout = how, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.how == "input":
            return self.head(self.second(y) + x)
        if self.how == "random":
            return self.head(self.second(self.dropout(self.dropout(y))))
        z = self.second(y)
        if self.how == "a look":
            return self.head(z) if bool(y.max() < 100) else self.head(-z)
        return self.head(z + y)


@pytest.mark.parametrize(
    ("how", "cut", "runs"),
    [("input", 1, True), ("input", 2, True), ("around", 1, True), ("around", 2, False), ("a look", 2, False)],
)
def test_what_reaches_around_the_cut_is_noticed(
    how: str, cut: int, runs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, data = Skipping(how), TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    reference = copy.deepcopy(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        example=data.tensors[0][:2],
        steps_per_epoch=2,
        num_epochs=3,
        settings=FreezeConfig(freeze="static", cut=cut),
        world=hvfreeze.SoloWorld(),
    )
    cached = hvfreeze.CachedLoader(DataLoader(data, batch_size=4), optimizer, directory=tmp_path)
    for _ in range(2):
        for number, (batch, _) in enumerate(cached):
            assert torch.equal(cached.suffix(batch), reference(data.tensors[0][4 * number : 4 * number + 4]))
    assert (cached.rows_read > 0) == runs == ("nothing is cached at this cut" not in caplog.text)
    cached.close()


def test_random_numbers_before_the_cut_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The dropout is called twice, so that it belongs to no block and goes on to be active.
    model, data = Skipping("random"), TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        example=data.tensors[0][:2],
        steps_per_epoch=2,
        num_epochs=3,
        settings=FreezeConfig(freeze="static", cut=2),
        world=hvfreeze.SoloWorld(),
    )
    cached = hvfreeze.CachedLoader(DataLoader(data, batch_size=4), optimizer, directory=tmp_path)
    assert [batch.cut for _ in range(2) for batch, _ in cached] == [0] * 4
    assert "random numbers are drawn before it" in caplog.text
    cached.close()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), {}, "a cached loader needs numbered samples"),
        (lambda: DataLoader(images(), batch_size=None), {}, "a cached loader needs numbered samples"),
        (lambda: DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2), {}, "give split="),
    ],
)
def test_a_loader_that_cannot_be_cached_is_refused(loader: Any, options: Any, words: str, tmp_path: Path) -> None:
    model = image_model()
    freezer = hvfreeze.freeze_by_vote(
        model, torch.optim.SGD(model.parameters(), lr=0.1), hvfreeze.SoloWorld(), steps_per_epoch=2, num_epochs=2
    )
    with pytest.raises(UsageError, match=re.escape(words)):
        hvfreeze.CachedLoader(loader(), freezer, directory=tmp_path, **options)
