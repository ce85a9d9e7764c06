"""What must not be cached, or not under the same name: draws, other prefixes, and what reaches around the cut."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

import hvfreeze
from hvfreeze.errors import UsageError
from hvfreeze.integration.split_forward import SplitForward, halves_of
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.traced import blocks_of
from tests.hub_models import save_small
from tests.single.integration.counted_images import ROWS, SAMPLES, image_model, images, still


class Noisy(Dataset[Any]):
    """Random draws of three libraries; views make them fixed."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, 8, 8) + float(np.random.rand()) + index, index % 3


def test_random_draws_are_refused_without_views_and_fixed_with_them(tmp_path: Path) -> None:
    model = image_model()

    def open_cached(**options: Any) -> hvfreeze.CachedLoader:
        optimizer = still(model)
        return hvfreeze.CachedLoader(DataLoader(Noisy(), batch_size=ROWS), optimizer, directory=tmp_path, **options)

    with pytest.raises(UsageError, match=r"returns a different sample.*pass views=K"):
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


def test_looking_at_rows_copies_them_and_not_the_data_set_that_they_lie_in(tmp_path: Path) -> None:
    held: list[int] = []

    def collate(batch: list[Any]) -> Any:
        held.extend(image.untyped_storage().nbytes() // (image.numel() * image.element_size()) for image, _ in batch)
        return default_collate(batch)

    loader = DataLoader(
        TensorDataset(torch.rand(SAMPLES, 3, 8, 8), torch.arange(SAMPLES) % 3), ROWS, collate_fn=collate
    )
    hvfreeze.CachedLoader(loader, still(image_model()), directory=tmp_path).close()
    # The rows themselves lie in the data set; most that are collated are copies.
    assert set(held) == {1, SAMPLES} and held.count(1) > held.count(SAMPLES)


def mean_of_neighbours(batch: list[Any]) -> Any:
    x, y = default_collate(batch)
    return (x + x.roll(1, 0)) / 2, y


def mixed_now_and_then(kind: str) -> Callable[[list[Any]], Any]:
    """Return a collate_fn that mixes half of the batches, by the random numbers of a library."""
    own = np.random.default_rng(0)
    draws = {
        "torch": lambda: float(torch.rand(())),
        "numpy": np.random.rand,
        "own": own.random,
    }

    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        return (0.5 * x + 0.5 * x.flip(0) if draws[kind]() < 0.5 else x), y

    return collate


def every_tenth() -> Callable[[list[Any]], Any]:
    calls = itertools.count(1)

    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        return (x.flip(0) if next(calls) % 10 == 0 else x), y

    return collate


def labels_smoothed(batch: list[Any]) -> Any:
    x, y = default_collate(batch)
    return x, nn.functional.one_hot(y, 3).float().lerp(nn.functional.one_hot(y, 3).float().mean(0), 0.1)


BATCHWISE: dict[str, Callable[[], Callable[[list[Any]], Any]]] = {
    "always": lambda: mean_of_neighbours,
    **{f"half by {kind}": partial(mixed_now_and_then, kind) for kind in ("torch", "numpy", "own")},
    "every tenth": every_tenth,
    "labels": lambda: labels_smoothed,
}


def assert_whole(cached: Any, model: nn.Module) -> None:
    """Compare two epochs of a loader with the model."""
    for _ in range(2):
        for number, (rows, _) in enumerate(cached):
            pixels = images().inner.tensors[0][ROWS * number : ROWS * number + ROWS]
            assert torch.equal(cached.suffix(rows), model(pixels))


@pytest.mark.parametrize(
    ("name", "views"),
    [("always", 1), ("half by torch", 2), ("half by numpy", 1), ("half by own", 1), ("every tenth", 1), ("labels", 2)],
)
def test_what_acts_on_batches_is_refused_with_what_to_do(name: str, views: int, tmp_path: Path) -> None:
    loader = DataLoader(images(), batch_size=ROWS, shuffle=True, collate_fn=BATCHWISE[name]())
    with pytest.raises(
        UsageError,
        match=r"a row depends on its batch.*collate_fn.*mix the rows of CachedLoader, as in rows, labels = v2",
    ):
        hvfreeze.CachedLoader(loader, still(image_model()), directory=tmp_path, views=views)


class Lengths(Dataset[Any]):
    """Texts of several lengths, which a collate_fn pads to the longest of a batch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.arange(2 + index % 5), index % 3


def padded(batch: list[Any]) -> Any:
    return nn.utils.rnn.pad_sequence([x for x, _ in batch], True), torch.tensor([y for _, y in batch])


class Now(Dataset[Any]):
    """Draws for a part of the samples, from a generator of a library or of its own."""

    def __init__(self, share: float, *, own: bool = False) -> None:
        self.share, self.own = share, np.random.default_rng(0) if own else None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        drawn = self.own.random() if self.own is not None else float(torch.rand(()))
        return torch.full((3, 8, 8), float(index)) * (-1.0 if drawn < self.share else 1.0), index % 3


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_draws_for_a_part_of_the_samples_are_found(share: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"returns a different sample.*pass views=K"):
        hvfreeze.CachedLoader(DataLoader(Now(share), ROWS * 4), still(image_model()), directory=tmp_path)
    hvfreeze.CachedLoader(DataLoader(Now(share), ROWS * 4), still(image_model()), directory=tmp_path, views=2)


def test_views_do_not_fix_draws_of_a_generator_of_the_data_sets_own(tmp_path: Path) -> None:
    loader = DataLoader(Now(0.5, own=True), batch_size=ROWS * 4)
    with pytest.raises(UsageError, match=r"returns a different sample.*not from the data set's own generators"):
        hvfreeze.CachedLoader(loader, still(image_model()), directory=tmp_path, views=2)


@pytest.mark.parametrize("layer", ["batch statistics", "mixed"])
def test_blocks_that_look_at_neighbours_are_not_cached(
    layer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.7 * x + 0.3 * x.flip(0)

    torch.manual_seed(0)
    looks = nn.BatchNorm2d(6, track_running_stats=False) if layer == "batch statistics" else Mixing()
    first = nn.Sequential(nn.Conv2d(3, 6, 3), looks)
    model = nn.Sequential(first, nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 3))
    cached = hvfreeze.CachedLoader(DataLoader(images(), batch_size=ROWS), still(model), directory=tmp_path)
    assert_whole(cached, model)
    assert "no activations are cached at this cut: blocks up to 0 normalise with batch statistics" in caplog.text
    assert cached.rows_read == 0
    cached.close()


def marks(tmp_path: Path, **changes: Any) -> str:
    """Return the name of the file that a loader makes."""
    model = changes.get("model", image_model)()
    data = changes.get("data", images)()
    optimizer = still(model, changes.get("cut", 1))
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


@dataclass(frozen=True)
class Record:
    path: Path


class Files(Dataset[Any]):
    """A sample a file, which it knows in a way of its own."""

    def __init__(self, folder: Path, known: Callable[[Path], Any]) -> None:
        self.known = [known(path) for path in sorted(folder.glob("*.pt"))]

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, index: int) -> Any:
        place = self.known[index]
        return torch.load(place.path if isinstance(place, Record) else place), index % 3


@pytest.mark.parametrize("known", [str, Record], ids=["text", "record"])
def test_rows_of_files_that_were_replaced_lie_in_another_file(tmp_path: Path, known: Callable[[Path], Any]) -> None:
    """Also of one that no look at a few samples shows."""
    torch.manual_seed(0)
    for number in range(SAMPLES):
        torch.save(torch.randn(3, 8, 8), tmp_path / f"{number:02}.pt")

    def made() -> str:
        return marks(tmp_path, data=lambda: Files(tmp_path, known))

    assert made() != "none" and made() == "none"
    replaced = tmp_path / "01.pt"
    torch.save(torch.randn(3, 8, 8), replaced)
    os.utime(replaced, ns=(1, 1))
    assert made() != "none"
    replaced.rename(tmp_path / "01-.pt")
    assert made() != "none"


@pytest.mark.parametrize("store", [True, False])
def test_samples_that_change_between_epochs_are_noticed(tmp_path: Path, store: bool) -> None:
    """As where a script tells its data set of each epoch, or lets it draw: kept rows are not those of its samples."""
    model, data = image_model(), Now(0.0)
    loader = DataLoader(data, batch_size=ROWS * 4)
    cached = hvfreeze.CachedLoader(loader, still(model), directory=tmp_path, store=store)
    first = [batch.tensor for batch, _ in cached]
    data.share = 0.5
    if store:
        with pytest.raises(UsageError, match=r"has changed since its CachedLoader was created.*store=False"):
            next(iter(cached))
    else:
        assert not torch.equal(first[0], next(iter(cached))[0].tensor)
    cached.close()


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
    [
        ("input", 1, True),
        ("input", 2, True),
        ("around", 1, True),
        ("around", 2, False),
        ("a look", 2, False),
        # The dropout is called twice, so that it belongs to no block and goes on to be active.
        ("random", 2, False),
    ],
)
def test_what_reaches_around_the_cut_is_noticed(
    how: str, cut: int, runs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, data = Skipping(how), TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    reference = copy.deepcopy(model)
    optimizer = still(model, cut, example=data.tensors[0][:2])
    cached = hvfreeze.CachedLoader(DataLoader(data, batch_size=4), optimizer, directory=tmp_path)
    for _ in range(2):
        for number, (batch, _) in enumerate(cached):
            with torch.random.fork_rng():
                found = cached.suffix(batch)
            assert torch.equal(found, reference(data.tensors[0][4 * number : 4 * number + 4]))
    refusal = "gives another output than its forward pass, e.g. because of a skip connection across the cut or random"
    assert (cached.rows_read > 0) == runs == (refusal not in caplog.text)
    cached.close()


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_model_that_does_more_than_its_blocks_is_not_cached(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = image_model().eval()
    if how == "hook":
        model.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    else:
        own = model.forward
        model.forward = lambda x: own(x / 2)  # type: ignore[method-assign,assignment]
    cached = hvfreeze.CachedLoader(DataLoader(images(), batch_size=ROWS), still(model), directory=tmp_path)
    assert_whole(cached, model)
    assert "no activations are cached at this cut: cut 1: running the blocks of Sequential" in caplog.text
    assert cached.rows_read == 0
    cached.close()


def test_comparing_a_chain_with_its_model_changes_neither() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    halves = halves_of(cut_into_blocks(model))
    halves.check(torch.rand(6, 4, generator=torch.Generator().manual_seed(0)), 1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(UsageError, match="has 2 inputs, but its first block takes one"):
        halves.before({"x": torch.ones(6, 4), "mask": torch.ones(6)}, 0, 1, None)  # type: ignore[arg-type]


def test_a_classifier_of_transformers_is_not_cached_and_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    model = save_small("vit", tmp_path / "model")
    pixels = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(pixels, torch.arange(8) % 3), batch_size=4)
    cached = hvfreeze.CachedLoader(
        loader, still(model), directory=tmp_path, split=lambda batch: ({"pixel_values": batch[0]}, batch[1])
    )
    for _ in range(2):
        for number, (rows, _) in enumerate(cached):
            expected = model(pixels[4 * number : 4 * number + 4]).logits
            assert torch.equal(cached.suffix(rows).logits, expected)
    assert "ViTForImageClassification returns ImageClassifierOutput, but its blocks return one tensor" in caplog.text
    assert cached.rows_read == 0
    cached.close()


class WithPositions(nn.Module):
    """A text whose positions are learned, as the answer of a layer that sees no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(9, 6), nn.Embedding(4, 6)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.first(self.token(tokens) + self.position(torch.arange(tokens.shape[1]))).mean(1))


@pytest.mark.parametrize("rows", [3, 4])
def test_an_answer_that_does_not_grow_with_the_batch_is_no_obstacle(
    rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, data = WithPositions(), TensorDataset(torch.randint(9, (10, 4)), torch.arange(10) % 3)
    reference = copy.deepcopy(model)
    optimizer = still(model, 3, blocks=["token", "position", "first", "head"], example=data.tensors[0][:2])
    cached = hvfreeze.CachedLoader(DataLoader(data, batch_size=rows), optimizer, directory=tmp_path)
    for _ in range(3):
        for number, (batch, _) in enumerate(cached):
            tokens = data.tensors[0][rows * number : rows * (number + 1)]
            torch.testing.assert_close(cached.suffix(batch), reference(tokens))
    assert cached.rows_read > 0 and "no activations are cached" not in caplog.text
    cached.close()


@pytest.mark.parametrize(("rule", "needs_inputs"), [("even", False), ("finite", True)])
def test_a_model_that_asserts_what_it_is_given_is_no_obstacle(rule: str, needs_inputs: bool) -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) % 2 == 0 if rule == "even" else bool(x.isfinite().all())
            return self.third(self.second(self.first(x)) * 2)  # type: ignore[no-any-return]

    inputs = torch.rand(4, 4)
    halves = SplitForward(blocks_of(Strict().eval(), example=inputs))
    halves.check(inputs, 1)
    assert halves.needs_inputs == needs_inputs


class Endless(Sampler[int]):
    """Gives sample 0 for ever."""

    def __iter__(self) -> Any:
        return itertools.repeat(0)


class WithLength(Endless):
    def __len__(self) -> int:
        return 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), "CachedLoader needs a map-style data set"),
        (lambda: DataLoader(images(), batch_size=None), "CachedLoader needs a map-style data set"),
        (lambda: DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2), "pass split="),
        (lambda: DataLoader(images(), batch_size=2, sampler=Endless()), "needs a sampler with a length"),
        (lambda: DataLoader(images(), batch_size=2, sampler=WithLength()), "yields more batches than its length of 2"),
        (lambda: DataLoader(Lengths(), batch_size=ROWS, collate_fn=padded), "Draw and pad in the data set"),
    ],
)
def test_a_loader_that_cannot_be_cached_is_refused(loader: Any, words: str, tmp_path: Path) -> None:
    model = image_model()
    with pytest.raises(UsageError, match=re.escape(words)):
        next(iter(hvfreeze.CachedLoader(loader(), still(model), directory=tmp_path)))
