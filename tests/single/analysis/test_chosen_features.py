"""A group lasso finds the features that tell classes apart, and what is said of choices follows from the rows."""

from __future__ import annotations

import pytest
import torch

from analysis.chosen_features import SHARES, Views, chosen, solved
from analysis.parts.selection.group_lasso import fitted, gradient, largest_moment, used
from analysis.parts.selection.tables import answers, table

CLASSES, TOLD, IDLE = 10, 12, 40


def views(rows: int = 400) -> Views:
    """Return features of which the first TOLD lie where their class is, and the others say nothing."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(CLASSES, TOLD, generator=generator)
    labels = torch.arange(2 * rows) % CLASSES
    told = centres[labels] + torch.randn(2 * rows, TOLD, generator=generator)
    features = torch.cat([told, torch.randn(2 * rows, IDLE, generator=generator)], 1)
    held_out = torch.arange(rows) % 7 == 0
    return Views(features[:rows], labels[:rows], held_out, features[rows:], labels[rows:])


def standardised(features: torch.Tensor) -> torch.Tensor:
    return (features - features.mean(0)) / features.std(0, correction=0)


def test_the_features_that_tell_classes_apart_are_used_most() -> None:
    known = views()
    found = used(standardised(known.rows), known.labels, classes=CLASSES)
    assert set(found.argsort(descending=True)[:TOLD].tolist()) == set(range(TOLD))
    assert int((found[TOLD:] == 0).sum()) > IDLE // 2


def test_no_feature_is_used_from_the_strength_on_that_lets_none() -> None:
    known = views()
    assert not used(standardised(known.rows), known.labels, classes=CLASSES, strength=1.01).any()
    assert used(standardised(known.rows), known.labels, classes=CLASSES, strength=0.9).any()


def test_what_is_found_is_a_minimum() -> None:
    """In a minimum the loss falls along a used feature's weights as much as the penalty rises, along none more."""
    known, strength = views(), 0.1
    features, truth = standardised(known.rows), torch.nn.functional.one_hot(known.labels, CLASSES).float()
    bias, nothing = truth.mean(0).log(), torch.zeros(TOLD + IDLE, CLASSES)
    limit = strength * float(gradient(features, truth, nothing, bias).norm(dim=1).max())
    found = fitted(features, known.labels, classes=CLASSES, strength=strength, steps=800)
    falls, norms = -gradient(features, truth, found, bias), found.norm(dim=1, keepdim=True)
    is_used = norms[:, 0] > 0
    assert 0 < int(is_used.sum()) <= TOLD + 3
    assert torch.allclose(falls[is_used], (limit * found / norms)[is_used], atol=0.02 * limit)
    assert float(falls[~is_used].norm(dim=1).max()) <= 1.001 * limit


def test_the_largest_moment_is_the_largest_eigenvalue() -> None:
    features = views().rows
    expected = torch.linalg.eigvalsh(features.double().t() @ features.double() / len(features))[-1]
    assert largest_moment(features, steps=200) == pytest.approx(float(expected), rel=1e-3)


def test_shares_of_the_features_are_chosen_by_use_and_at_random() -> None:
    found = dict(chosen(views(), seed=0))
    assert list(found) == [
        "all",
        *(f"{share:.0%} {how}" for share in SHARES for how in ("by group lasso", "at random")),
    ]
    width = TOLD + IDLE
    for share in SHARES:
        for how in ("by group lasso", "at random"):
            assert found[f"{share:.0%} {how}"].test.shape[1] == round(share * width)
    # A tenth of them are fewer than those that tell something, a half are more.
    kept = {float(value) for value in found["50% by group lasso"].rows[0]}
    assert kept >= {float(value) for value in views().rows[0, :TOLD]}


@pytest.mark.parametrize("head", ["compared", "linear"])
def test_a_head_on_useful_features_is_right_and_one_on_idle_features_guesses(head: str) -> None:
    known = views()
    good, penalty = solved(known.only(torch.arange(TOLD)), head)
    bad, _ = solved(known.only(torch.arange(TOLD, TOLD + IDLE)), head)
    given, taken = solved(known, head, penalty=penalty)
    assert good > 0.9 > 0.3 > bad
    assert taken == penalty and given > 0.8
    assert known.beside(known).test.shape == (400, 2 * (TOLD + IDLE))


def test_both_questions_are_answered_for_both_heads() -> None:
    rows = [
        {"seed": str(seed), "features": name, "head": head, "width": "9", "accuracy": str(accuracy + seed / 1000)}
        for seed in range(3)
        for name, accuracy in (("all", 0.7), ("50% by group lasso", 0.6), ("tuned", 0.72), ("tuned and frozen", 0.73))
        for head in ("compared", "linear")
    ]
    assert answers(rows).count("50% by group lasso -10.0 points") == 2
    assert answers(rows).count("beside those of after +1.0 points") == 2
    assert table(rows).count("worse (negative)") == 2 and table(rows).count("better") == 4
