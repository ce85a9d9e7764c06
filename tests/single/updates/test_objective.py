from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hvfreeze.config.tree import from_dict
from hvfreeze.optim import Objective
from hvfreeze.training.verb_settings import for_head, for_network

FEATURES = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)).contiguous(
    memory_format=torch.channels_last
)
LABELS, SAMPLES = torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6)
LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def test_without_mixup_a_batch_is_what_it_was() -> None:
    seen = Objective().mix(FEATURES, LABELS, SAMPLES, step=3)
    assert seen.features is FEATURES and seen.labels is LABELS and seen.partners is None
    assert torch.equal(Objective().loss(LOGITS, seen), functional.cross_entropy(LOGITS, LABELS))


def test_a_mixture_is_a_function_of_seed_step_and_replica_and_of_nothing_drawn_before() -> None:
    first = Objective(mixup=0.4, seed=1).mix(FEATURES, LABELS, SAMPLES, step=3)
    torch.rand(5)
    again = Objective(mixup=0.4, seed=1).mix(FEATURES, LABELS, SAMPLES, step=3)
    assert torch.equal(first.features, again.features) and first.part == again.part
    others = [
        Objective(mixup=0.4, seed=-1).mix(FEATURES, LABELS, SAMPLES, step=3),
        Objective(mixup=0.4, seed=1).mix(FEATURES, LABELS, SAMPLES, step=4),
        Objective(mixup=0.4, seed=1).mix(FEATURES, LABELS, SAMPLES, step=3, number=2),
        Objective(mixup=0.4, seed=2).mix(FEATURES, LABELS, SAMPLES, step=3),
        Objective(mixup=0.4, seed=1, replica=1).mix(FEATURES, LABELS, SAMPLES, step=3),
    ]
    assert len({first.part, *(other.part for other in others)}) == 6


def test_features_and_loss_are_mixed_in_the_same_parts() -> None:
    objective = Objective(mixup=1.0, smoothing=0.1, seed=5)
    seen = objective.mix(FEATURES, LABELS, SAMPLES, step=0)
    assert seen.partners is not None and 0.5 <= seen.part <= 1
    # Sample i holds `part` of itself and the rest of its partner.
    found = []
    for row in range(6):
        rest = (seen.features[row] - seen.part * FEATURES[row]) / (1 - seen.part)
        found.append(int((FEATURES - rest).abs().amax(dim=(1, 2, 3)).argmin()))
        torch.testing.assert_close(rest, FEATURES[found[-1]], atol=1e-4, rtol=1e-4)
    assert sorted(found) == list(range(6)) and seen.partners.tolist() == found
    others = LABELS[seen.partners]
    one, other = (functional.cross_entropy(LOGITS, of, label_smoothing=0.1) for of in (LABELS, others))
    torch.testing.assert_close(objective.loss(LOGITS, seen), seen.part * one + (1 - seen.part) * other)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_parts_are_drawn_from_beta(alpha: float) -> None:
    parts = torch.tensor(
        [Objective(mixup=alpha).mix(FEATURES, LABELS, SAMPLES, step=step).part for step in range(2000)]
    )
    # E|2x - 1| of Beta(a, a) tells alphas apart: a half for a = 1, near one for a small.
    spread = float((2 * parts - 1).mean())
    assert abs(spread - {0.1: 0.87, 1.0: 0.5}[alpha]) < 0.03


def test_mixing_keeps_the_memory_format() -> None:
    mixed = Objective(mixup=1.0).mix(FEATURES, LABELS, SAMPLES, step=0).features
    assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_a_stage_that_solves_a_head_mixes_nothing() -> None:
    config = from_dict({"freeze": "auto", "mixup": 0.2, "weights": "w.pt"})
    assert for_head(config).optimizer.mixup == 0 and for_network(config).optimizer.mixup == 0.2
