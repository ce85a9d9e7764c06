"""The front of full fine-tuning, comparisons with it, and their wording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.experiments import EVERY
from analysis.sweeps.kept import RESULTS
from analysis.sweeps.results import Budget, Front, Results, best_lr


def test_the_front_is_linear_between_budgets_and_flat_beyond() -> None:
    front = Front((Budget(20.0, 0.8, epochs=10), Budget(10.0, 0.6, epochs=5)))
    assert [front.accuracy(seconds) for seconds in (15.0, 5.0, 99.0)] == [pytest.approx(0.7), 0.6, 0.8]
    assert (front.seconds(5), front.seconds(7)) == (10.0, None)


def rows(seed: int, *, slower: float = 1.0, better: float = 0.0) -> list[dict[str, Any]]:
    common = {"cache": "off", "cache_bytes": 0, "augment": "fresh", "seed": seed, "epochs": 10}
    made = {"full": (20.0, 0.8), "frozen": (15.0, 0.75)}
    return [
        {**common, "label": label, "train_seconds": slower * taken, "test_accuracy": right + better}
        for label, (taken, right) in made.items()
    ]


def test_a_lead_over_the_front_is_taken_within_a_seed_at_the_pace_of_its_full_run() -> None:
    """One seed is better throughout, and slower: neither has anything to do with freezing."""
    fronts = {
        seed: Front((Budget(10.0, 0.6 + better, epochs=5), Budget(20.0, 0.8 + better, epochs=10)))
        for seed, better in ((0, 0.0), (1, 0.1))
    }
    both = [*rows(0), *rows(1, slower=3.0, better=0.1)]
    results = Results(Path(), both, fronts[0], fronts, "full")
    found = results.over_front("frozen")
    assert results.paces() == {0: 1.0, 1: 3.0}
    assert found.mean == pytest.approx(0.75 - 0.7)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-9)
    assert Results(Path(), both, fronts[0], {0: fronts[0]}, "full").over_front("frozen").n == 1
    assert Results(Path(), both[1:], fronts[0], fronts, "full").over_front("frozen").n == 1
    assert results.ratio("frozen").mean == pytest.approx(4 / 3)
    assert (results.gain("frozen"), results.saved("frozen")) == ("1.33x (1.33 to 1.33)", "25.0 % (25.0 to 25.0)")


def test_a_caption_counts_the_seeds_of_what_it_shows() -> None:
    found = [{"label": label, "seed": seed} for label, n in (("a", 3), ("b", 5), ("c", 4)) for seed in range(n)]
    assert Results(Path(), found).seeds(["a"]) == "n = 3 seeds"
    assert Results(Path(), found).seeds() == "n = 3 to 5 seeds"


def test_the_learning_rate_is_chosen_on_held_out_samples_by_the_mean() -> None:
    tried = (("lr1", 0.1, 0.9, 0.2), ("lr1", 0.1, 0.5, 0.2), ("lr2", 0.2, 0.8, 0.2), ("epochs1", 9.0, 1.0, 0.0))
    columns = ("label", "lr", "test_accuracy", "validation_fraction")
    assert best_lr([dict(zip(columns, row)) for row in tried]) == 0.2
    assert best_lr([]) is None


def recorded(name: str) -> Results:
    return next(each for each in EVERY if each.name == name).open(RESULTS)


def test_runs_that_stored_nothing_are_not_called_cached() -> None:
    results = recorded("pixels64")
    assert results.shown_as("geometric-cached") == "geometric, views:2 (nothing cached)"
    assert results.shown_as("cut4-cached") == "cut4-cached"
    assert recorded("caching").shown_as("voted-auto") == "voted-auto (cached in 1 of 3 runs)"
    assert results.runs_of("geometric-cached")[1].name == "geometric, views:2 (nothing cached)-s1"


def test_the_recorded_lead_of_five_cached_stages_at_64_pixels_is_not_sure() -> None:
    lead = recorded("pixels64").over_front("cut5-cached")
    assert lead.low < 0 < lead.high
