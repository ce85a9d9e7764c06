"""Images that are too small for a network are noted: on maps of one pixel a convolution has no neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hvfreeze.model.small_maps import note_on_small_maps
from tests.program import call


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(())


def network(*strides: int) -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, stride=stride, padding=1) for stride in strides))


@pytest.mark.parametrize(
    ("side", "model", "found"),
    [
        (4, network(2, 2, 2, 2), "2 of 4 convolutions get maps of 1 x 1 pixel; use --image-size 8 or more"),
        (8, nn.Sequential(Noise(), network(2, 2, 2, 2)), ""),
        (64, network(2, 2, 2, 2, 2, 2, 2, 2), ""),
        (1, nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), ""),
        # Made for one side only.
        (2, nn.Sequential(network(2, 1, 1, 1), nn.Flatten(), nn.Linear(3, 2)), "; use a larger --image-size"),
    ],
)
def test_convolutions_on_single_pixels_are_counted(side: int, model: nn.Module, found: str) -> None:
    generator = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    notes = note_on_small_maps("it", model, (3, side, side))
    assert [found in note and f"images of {side} pixels are too small for it" in note for note in notes] == [True][
        : bool(found)
    ]
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_run_on_tiny_images_says_so(tmp_path: Path) -> None:
    flags = "--model shufflenet_v2_x0_5 --image-size 4 --train-samples 24 --batch-size 10 --epochs 1 --threads 1"
    outcome = call("train", *flags.split(), "--validation-fraction", "0.2", "--run-dir", str(tmp_path))
    assert "are too small for shufflenet_v2_x0_5: " in outcome.stdout, str(outcome)
