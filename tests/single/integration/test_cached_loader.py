"""A cached loader gives a script the bits that its own loop computes; an image and a text model, one process."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hvfreeze
from hvfreeze.comm import agreement
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import RefusedError
from hvfreeze.freezing.criteria import CRITERIA, Criterion, Evidence
from hvfreeze.freezing.freezer import freeze_by_vote
from hvfreeze.integration import cached_loader as module
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.runs.reading import Move
from tests.single.integration.counted_images import EPOCHS, LOADED, ROWS, SAMPLES, Counting, image_model, images, still
from tests.single.model.own_models import Text


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


def sentences() -> Counting:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (SAMPLES, 6), generator=generator)
    return Counting(TensorDataset(ids, ids.cumsum(1) > 60, ids.sum(1) % 3))


class Drawing(Counting):
    """Draws a number that comes to nothing; a plain loop draws it from the loop's own random state."""

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return super().__getitem__(index)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Counting]]] = {
    "a chain of images": (image_model, images),
    "images through glue": (Glued, images),
    "text with a mask": (text_model, sentences),
}


HISTORY: dict[str, list[Move]] = {}
"""Where the cut has been in the last training of each kind."""


def batch_of(data: Dataset[Any], rows: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*(data[i] for i in range(rows))))[:-1]


def train(
    case: str,
    how: str,
    directory: Path | None,
    *,
    moves: dict[int, int],
    epochs: int = EPOCHS,
    rows: int = ROWS,
    settings: FreezeConfig = FreezeConfig(freeze="static", cut=0),  # noqa: B008  (frozen)
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
        settings=settings,
        world=SoloWorld(),
    )
    HISTORY[how] = optimizer.freezer.cut_history
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


def encoded(batch: Any) -> tuple[Any, Any]:
    """Return the inputs in a mapping that is no dict, as tokenizers give them, and the labels."""
    return UserDict(zip(("ids", "mask"), batch[:-1])), batch[-1]


def named(batch: Any) -> tuple[Any, Any]:
    """Return the images as `nn.Sequential` calls its input, and the labels."""
    return {"input": batch[0]}, batch[-1]


ONCE, TWICE, THAWED = {4: 1}, {3: 1, 10: 2}, {4: 2, 12: 0, 14: 1}


@pytest.mark.parametrize(
    ("case", "moves", "options"),
    [
        ("a chain of images", TWICE, {}),
        ("a chain of images", THAWED, {}),
        ("a chain of images", ONCE, {"split": named}),
        ("images through glue", ONCE, {}),
        pytest.param("text with a mask", TWICE, {}, marks=pytest.mark.seldom),
        ("text with a mask", {4: 2}, {"split": encoded}),
    ],
)
def test_cached_computed_and_plain_training_have_the_same_bits(
    case: str, moves: dict[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    plain, _ = train(case, "plain", tmp_path, moves=moves)
    computed, without = train(case, "computed", tmp_path, moves=moves, **options)
    cached, loader = train(case, "cached", tmp_path, moves=moves, **options)
    assert equal(plain, computed) and equal(plain, cached)
    assert loader.rows_read > 0 and loader.exact and without.rows_read == 0


@pytest.mark.parametrize("case", ["a chain of images", pytest.param("images through glue", marks=pytest.mark.seldom)])
def test_blocks_that_are_cached_are_looked_at_and_thaw_as_they_would_without(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []

    def thaw(seen: Evidence) -> int:
        """Propose that all thaws once two looks in a row have found what frozen blocks gain."""
        looks.append(seen.probes)
        return 0 if len(seen.probes) == 2 and all(seen.probes) else seen.cut

    monkeypatch.setitem(CRITERIA, "coherence", Criterion(thaw, watches="gains"))
    settings = FreezeConfig(freeze="coherence", interval=8, freeze_warmup=8)
    found = []
    for how in ("plain", "computed", "cached"):
        looks.clear()
        model, loader = train(case, how, tmp_path, moves={3: 2, 28: 1}, epochs=8, settings=settings)
        found.append((model, HISTORY[how], list(looks)))
    assert [tuple(move)[1:] for move in HISTORY["plain"]] == [(0, 0), (3, 2), (24, 0), (28, 1)]
    assert found[0][1:] == found[1][1:] == found[2][1:]
    assert equal(found[0][0], found[1][0]) and equal(found[0][0], found[2][0])
    assert loader.rows_read >= 2 * SAMPLES, "an epoch before each look"


def test_what_the_data_set_draws_does_not_reach_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "drawing", (image_model, lambda: Drawing(images().inner)))
    computed, _ = train("drawing", "computed", tmp_path, moves={4: 1})
    cached, loader = train("drawing", "cached", tmp_path, moves={4: 1})
    assert equal(computed, cached) and loader.rows_read > 0


def test_samples_that_are_cached_are_not_read_again_and_a_later_run_computes_no_row(tmp_path: Path) -> None:
    _, first = train("a chain of images", "cached", tmp_path, moves=ONCE)
    assert len(LOADED) <= 2 * SAMPLES + (3 + EPOCHS) * ROWS, "one epoch, one sweep, and a look an epoch"
    assert first.rows_read == 4 * SAMPLES
    _, again = train("a chain of images", "cached", tmp_path, moves=ONCE)
    counted = [loader._activations.counters for loader in (first, again)]
    assert [one.rows_written for one in counted] == [SAMPLES, 0]
    assert counted[1].rows_read == 4 * SAMPLES and len(again.dataset) == SAMPLES
    assert len(list(tmp_path.glob("*.h5"))) == 1


def test_a_last_batch_that_is_smaller_is_filled_up(tmp_path: Path) -> None:
    computed, _ = train("a chain of images", "computed", tmp_path, moves=ONCE, rows=5)
    cached, loader = train("a chain of images", "cached", tmp_path, moves=ONCE, rows=5)
    assert equal(computed, cached) and loader.rows_read > 0


class FirstOfTwo(SoloWorld):
    """Rank 0, beside one that has some data set, and says what rank 0 does of all else."""

    size = 2

    def __init__(self, theirs: Callable[[Any], Any]) -> None:
        self.theirs = theirs
        self.names: list[str] = []

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        self.names.append(name)
        return [value, (*value[:2], *map(self.theirs, value[2:])) if name == "loader.seen" else value]


@pytest.mark.parametrize(
    ("theirs", "kept"), [(lambda data: data, SAMPLES // 2), (lambda data: {**data, "samples": ""}, SAMPLES)]
)
def test_a_rank_keeps_its_share_of_common_samples_and_all_of_its_own(
    theirs: Callable[[Any], Any], kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "ROUND_SECONDS", 0.0)
    model, settings, world = image_model(), FreezeConfig(freeze="static", cut=1), FirstOfTwo(theirs)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    freezer = freeze_by_vote(model, sgd, world, steps_per_epoch=4, num_epochs=3, settings=settings)
    cached = hvfreeze.CachedLoader(DataLoader(images(), batch_size=ROWS), freezer, directory=tmp_path)
    next(iter(cached))
    assert cached._activations.counters.rows_written == kept
    assert world.names.count("verdict.rounds.loader") == -(-kept // ROWS) + 1, "ranks meet between their forwards"
    cached.close()


def test_workers_read_what_is_missing(tmp_path: Path) -> None:
    loader = DataLoader(images(), batch_size=ROWS, num_workers=1, multiprocessing_context="fork")
    cached = hvfreeze.CachedLoader(loader, still(image_model()), directory=tmp_path)
    LOADED.clear()
    for _ in range(2):
        labels = [label for _, batch in cached for label in batch.tolist()]
        assert labels == [i % 3 for i in range(SAMPLES)]
    assert len(LOADED) == 3 * ROWS, "this process read more than the batch that the cut is tried with, and looks"
    cached.close()


def test_without_a_directory_activations_lie_in_the_users_cache_which_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_told", set())
    caplog.set_level("INFO", "hvfreeze")
    there = tmp_path / "hvfreeze" / "activations"
    for _ in range(2):
        train("a chain of images", "cached", None, moves={4: 1})
    assert list(there.glob("*.h5")) and there.stat().st_mode & 0o77 == 0
    assert [str(there) in line for line in caplog.messages if "choose another place with directory=" in line] == [True]


def test_a_directory_that_cannot_be_used_is_refused_in_a_scripts_own_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RefusedError, match=r"cannot be used.*choose another with directory="):
        train("a chain of images", "cached", tmp_path / "file", moves={})


@pytest.mark.parametrize("store", [True, False])
def test_labels_are_kept_in_memory_only_if_rows_are_stored(store: bool, tmp_path: Path) -> None:
    loader = DataLoader(images(), batch_size=ROWS)
    cached = hvfreeze.CachedLoader(loader, still(image_model()), directory=tmp_path, store=store)
    for _ in range(2):
        assert [label for _, batch in cached for label in batch.tolist()] == [i % 3 for i in range(SAMPLES)]
    assert bool(cached._passes.labels._columns) == store
    cached.close()
