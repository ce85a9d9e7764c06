"""Models by name: their initialisation, their default weights, and the images that they take."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.model_sources import build_model, set_memory_formats, smallest_image_size
from hvfreeze.torchvision_shim import torchvision
from tests.single.model.states import assert_equal_states, squeezenet, state_of


@pytest.mark.parametrize("name", ["resnet20", "googlenet"])
def test_initialisation_depends_on_torchs_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    first = build_model(name, num_classes=10, image_size=96)
    random_state = torch.get_rng_state()
    torch.manual_seed(5)
    second = build_model(name, num_classes=10, image_size=96)
    assert_equal_states(state_of(first.model), state_of(second.model))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert first.notes == []
    assert {tensor.dtype for tensor in first.model.parameters()} == {torch.float32}
    assert all(module.training for module in first.model.modules())
    assert first.model(torch.rand(2, 3, 96, 96)).shape == (2, 10)


def test_a_built_model_and_the_random_state_after_it_are_plain_torchvisions() -> None:
    torch.manual_seed(5)
    plain = torchvision.models.mobilenet_v3_small(num_classes=10)
    random_state = torch.get_rng_state()
    torch.manual_seed(5)
    built = build_model("mobilenet_v3_small", num_classes=10, image_size=32)
    assert_equal_states(state_of(built.model), state_of(plain))
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19", r"model \(resnet19\) must be .*; did you mean resnet18"),
        ("ResNet50", r"did you mean resnet50"),
        ("qqqqqq", r"known are alexnet, convnext_base"),
        ("deeplabv3_resnet50", r"must be a torchvision classifier"),
    ],
)
def test_an_unknown_model_is_refused_with_names_to_choose_from(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(name, num_classes=10, image_size=32)


@pytest.mark.parametrize(
    "name",
    [
        *("squeezenet1_1", "resnet18"),
        *(pytest.param(each, marks=pytest.mark.seldom) for each in ("googlenet", "inception_v3")),
    ],
)
def test_the_smallest_image_is_the_one_that_torchvision_states(name: str) -> None:
    stated = torchvision.models.get_model_weights(name).DEFAULT.meta["min_size"]
    assert smallest_image_size(build_model(name, num_classes=10, image_size=96).model) == stated[0]


@pytest.mark.parametrize(
    ("name", "smallest"), [("squeezenet1_1", 17), pytest.param("convnext_tiny", 32, marks=pytest.mark.seldom)]
)
def test_an_image_too_small_for_the_model_is_refused_with_the_smallest_size(name: str, smallest: int) -> None:
    small, built = smallest - 1, build_model(name, num_classes=10, image_size=smallest - 1)
    with pytest.raises(
        UsageError, match=rf"fails on images of {small}x{small} .*; use --image-size {smallest} or more"
    ):
        set_memory_formats(built, (3, small, small))
    model = build_model(name, num_classes=10, image_size=smallest).model
    assert model(torch.rand(2, 3, smallest, smallest)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "size", "near", "multiple"),
    [("vit_b_32", 7, 32, 32), ("vit_h_14", 32, 28, 14), ("maxvit_t", 100, 96, 32)],
)
def test_a_vision_transformer_wants_a_multiple_of_its_patches(name: str, size: int, near: int, multiple: int) -> None:
    with pytest.raises(
        UsageError, match=rf"\({size}\) must be a multiple of {multiple} for {name}.*--image-size {near}"
    ):
        build_model(name, num_classes=10, image_size=size)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torchvision downloads, by the start of the file's name; anything else is a network failure."""
    offered: dict[str, Any] = {}

    def load(url: str, **_: Any) -> Any:
        for start, state in offered.items():
            if url.rpartition("/")[2].startswith(start):
                return state
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", load)
    return offered


def test_default_weights_are_torchvisions(downloads: dict[str, Any]) -> None:
    downloads["squeezenet1_1-"] = donor = state_of(squeezenet(1000, seed=1))
    fresh = state_of(squeezenet(10, seed=2))
    random_state = torch.get_rng_state()
    torch.manual_seed(2)
    built = build_model("squeezenet1_1", num_classes=10, weights="DEFAULT", image_size=32)
    assert torch.equal(torch.get_rng_state(), random_state)
    head = {name: fresh[name] for name in ("classifier.1.weight", "classifier.1.bias")}
    assert_equal_states(state_of(built.model), {**donor, **head})
    assert built.notes == [
        "weights (DEFAULT): head classifier.1 is initialised at random: the weights have 1000 classes, the model 10"
    ]


@pytest.mark.usefixtures("downloads")
def test_default_weights_without_a_network_are_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    message = (
        r"DEFAULT\) of resnet18 cannot be downloaded from https://\S+pth: .*no route.*put that file into .*checkpoints"
    )
    with pytest.raises(RefusedError, match=message):
        build_model("resnet18", num_classes=10, weights="DEFAULT", image_size=32)


@pytest.mark.parametrize(
    ("name", "border"), [("googlenet", 2), pytest.param("inception_v3", 0, marks=pytest.mark.seldom)]
)
def test_default_weights_with_auxiliary_heads_lose_them_and_keep_what_they_compute(
    name: str, border: int, downloads: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    classes = {"googlenet": torchvision.models.GoogLeNet, "inception_v3": torchvision.models.Inception3}
    donor = classes[name](init_weights=False, transform_input=True).eval()
    for _, statistic in donor.named_buffers():
        if statistic.is_floating_point():
            statistic.add_(torch.rand_like(statistic))
    downloads[name] = donor.state_dict()
    model = build_model(name, num_classes=1000, weights="DEFAULT", image_size=96).model.eval()
    images = torch.rand(2, 3, 96, 96)
    assert not model.transform_input
    assert not any("aux" in key.lower() for key in model.state_dict())
    with torch.no_grad():
        expected = next(donor.children())(donor._transform_input(images))
        actual = next(model.children())(images)
        inside = slice(border, expected.shape[-1] - border)
        torch.testing.assert_close(actual[..., inside, inside], expected[..., inside, inside])


@pytest.mark.parametrize(("name", "layers", "parameters"), [("resnet20", 20, 269_722), ("resnet110", 110, 1_727_962)])
def test_the_narrow_resnets_have_the_papers_layers_and_parameters(name: str, layers: int, parameters: int) -> None:
    """He et al. 2016, table 6: 0.27 and 1.7 million; skips have none."""
    model = build_model(name, num_classes=10, image_size=32).model
    counted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(counted) == layers
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(cut_into_blocks(model, scheme="residual").blocks) == 2 + (layers - 2) // 2
    with pytest.raises(UsageError, match="torchvision has none"):
        build_model(name, num_classes=10, image_size=32, weights="DEFAULT")
