"""Models by name: their initialisation, their weights, and the images that they take."""

from __future__ import annotations

import os
import pickle
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.chain.blocks import cut_into_blocks
from hvfreeze.chain.models import build_model, smallest_image_size
from hvfreeze.chain.origins.weights import pretrained_weights, read_weights
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.torchvision_shim import torchvision

SHARED_WEIGHTS = Path(__file__).resolve().parents[3] / "../shared/data/resnet18-cifar100-64px-fp16.pt"


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def squeezenet(num_classes: int = 10, *, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("squeezenet1_1", num_classes=num_classes, image_size=32).model


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "googlenet", "inception_v3", "maxvit_t"])
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


def test_maxvit_is_torchvisions_own_at_224_pixels() -> None:
    built = build_model("maxvit_t", num_classes=1000, image_size=224).model
    shapes = [(name, tensor.shape) for name, tensor in torchvision.models.maxvit_t().state_dict().items()]
    assert [(name, tensor.shape) for name, tensor in built.state_dict().items()] == shapes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19", r"model \(resnet19\) is no .*; did you mean resnet18"),
        ("ResNet50", r"did you mean resnet50"),
        ("qqqqqq", r"known are alexnet, convnext_base"),
        ("deeplabv3_resnet50", r"is no torchvision classifier"),
    ],
)
def test_an_unknown_model_is_refused_with_names_to_choose_from(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(name, num_classes=10, image_size=32)


@pytest.mark.parametrize(
    "name",
    ["alexnet", "densenet121", "googlenet", "inception_v3", "squeezenet1_0", "squeezenet1_1", "vgg11", "resnet18"],
)
def test_the_smallest_image_is_the_one_that_torchvision_states(name: str) -> None:
    stated = torchvision.models.get_model_weights(name).DEFAULT.meta["min_size"]
    assert smallest_image_size(build_model(name, num_classes=10, image_size=96).model) == stated[0]


@pytest.mark.parametrize(
    ("name", "smallest"), [("squeezenet1_1", 17), ("alexnet", 63), ("convnext_tiny", 32), ("swin_t", 4)]
)
def test_an_image_too_small_for_the_model_is_refused_with_the_smallest_size(name: str, smallest: int) -> None:
    with pytest.raises(UsageError, match=rf"image size \({smallest - 1}\) is too small for {name}: .* is {smallest};"):
        build_model(name, num_classes=10, image_size=smallest - 1)
    model = build_model(name, num_classes=10, image_size=smallest).model
    assert model(torch.rand(2, 3, smallest, smallest)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "size", "near", "multiple"),
    [("vit_b_16", 30, 32, 16), ("vit_b_32", 7, 32, 32), ("vit_h_14", 32, 28, 14), ("maxvit_t", 100, 96, 32)],
)
def test_a_vision_transformer_wants_a_multiple_of_its_patches(name: str, size: int, near: int, multiple: int) -> None:
    with pytest.raises(
        UsageError, match=rf"\({size}\) must be a multiple of {multiple} for {name}.*--image-size {near}"
    ):
        build_model(name, num_classes=10, image_size=size)


def test_transformers_of_one_size_say_which() -> None:
    assert smallest_image_size(torchvision.models.VisionTransformer(64, 16, 1, 2, 8, 8)) == 64
    assert smallest_image_size(build_model("maxvit_t", num_classes=10, image_size=96).model) == 96


def plain(state: dict[str, Tensor]) -> Any:
    return state


SAVED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": plain,
    "half precision": lambda state: {name: t.half() if t.is_floating_point() else t for name, t in state.items()},
    "wrapped": lambda state: {"epoch": 3, "state_dict": state},
    "parallel": lambda state: {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}},
    "inside a module": lambda state: {f"model.{name}": tensor for name, tensor in state.items()},
    "compiled": lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    "before BatchNorm counted": lambda state: {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "mnasnet0_5"])
def test_a_state_dict_loads_however_it_was_saved(name: str, how: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = state_of(build_model(name, num_classes=10, image_size=32).model)
    if how == "half precision":
        expected = {n: t.half().float() if t.is_floating_point() else t for n, t in expected.items()}
    file = tmp_path / "weights.pt"
    torch.save(SAVED[how](expected), file)
    torch.manual_seed(2)
    built = build_model(name, num_classes=10, weights=str(file), image_size=32)
    assert_equal_states(state_of(built.model), expected)
    (note,) = built.notes
    assert "has 10 classes there too and is kept" in note


def test_a_head_of_another_size_is_initialised_afresh_and_one_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    donor = state_of(squeezenet(4, seed=1))
    torch.save(donor, file)
    fresh = state_of(squeezenet(10, seed=2))
    torch.manual_seed(2)
    built = build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)
    head = {name: fresh[name] for name in ("classifier.1.weight", "classifier.1.bias")}
    assert_equal_states(state_of(built.model), {**donor, **head})
    (note,) = built.notes
    assert note == f"weights ({file}): head classifier.1 has 4 classes there and 10 here; it is re-initialised"


@pytest.mark.parametrize(("kept", "reset"), [(0, False), (2, True)], ids=["backbone alone", "reset"])
def test_a_head_starts_afresh_where_there_is_none_or_none_is_wanted(kept: int, reset: bool, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    donor = state_of(squeezenet(10, seed=1))
    heads = ("classifier.1.weight", "classifier.1.bias")
    torch.save({name: tensor for name, tensor in donor.items() if name not in heads[kept:]}, file)
    fresh = state_of(squeezenet(10, seed=2))
    torch.manual_seed(2)
    built = build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32, reset_head=reset)
    assert_equal_states(state_of(built.model), {**donor, **{name: fresh[name] for name in heads}})
    (note,) = built.notes
    assert "initialised" in note


def test_half_a_head_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(without(state_of(squeezenet(10, seed=1)), "classifier.1.bias"), file)
    with pytest.raises(RefusedError, match=r"missing: classifier\.1\.bias"):
        build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_before_training(value: float, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    state = state_of(squeezenet(10))
    state["features.3.squeeze.bias"][1] = value
    torch.save(state, file)
    with pytest.raises(RefusedError, match=r"hold NaN or infinite numbers in features\.3\.squeeze\.bias"):
        build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)


def damaged(change: Callable[[dict[str, Any]], Any]) -> Any:
    return change(state_of(squeezenet()))


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, "features.0.bias"), r"do not fit SqueezeNet: missing: features\.0\.bias\. Are they"),
        (lambda s: without(s, *list(s)[4:10]), r"missing: features\.3\.\S+, \S+, \S+ and 3 more"),
        (lambda s: {**s, "extra.weight": torch.zeros(1)}, r"not part of the model: extra\.weight"),
        (
            lambda s: {**s, "features.0.bias": torch.zeros(3)},
            r"of another shape: features\.0\.bias \(3,\) instead of \(64,\)",
        ),
        (lambda s: {**s, "classifier.1.weight": torch.zeros(9, 3, 1, 1)}, r"another shape: classifier\.1\.weight"),
        (
            lambda s: torchvision.models.shufflenet_v2_x0_5().state_dict(),
            r"missing: features.*not part of the model: conv1",
        ),
        (lambda s: {}, "are no state_dict"),
        (lambda s: [1, 2], "are no state_dict"),
        (lambda s: torch.zeros(3), "are no state_dict"),
        (lambda s: {"features.0.bias": 3}, "are no state_dict"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(damaged(change), file)
    with pytest.raises(RefusedError, match=message) as refusal:
        build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


class WantsToRun:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_wants_to_run_code_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    file, trace = tmp_path / "weights.pt", tmp_path / "trace"
    file.write_bytes(pickle.dumps({"fc.weight": WantsToRun(trace)}, protocol=protocol))
    with pytest.raises(
        RefusedError, match=r"weights\.pt\) are refused: .*code.*none was run; save them with"
    ) as refusal:
        read_weights(str(file))
    assert "\n" not in str(refusal.value)
    assert not trace.exists()
    torch.save({"fc.weight": WantsToRun(trace)}, file)
    with pytest.raises(
        RefusedError, match=r"weights\.pt\) are refused: .*code must run \(posix\.mkdir\), and none was"
    ):
        read_weights(str(file))
    assert not trace.exists()


def test_a_file_that_is_missing_damaged_or_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"fc.weight": torch.zeros(1000)}, whole)
    contents = {
        "cut.pt": whole.read_bytes()[:1500],
        "empty.pt": b"",
        "text.pt": b"hello world\n",
        "noise.pt": bytes(range(256)),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            RefusedError, match=rf"weights \(.*{name}\) (cannot be read|are refused): .*torch\.save"
        ) as refusal:
            read_weights(str(tmp_path / name))
        assert "\n" not in str(refusal.value)
    with pytest.raises(RefusedError, match=r"absent\.pt\) cannot be read: No such file"):
        read_weights(str(tmp_path / "absent.pt"))
    with pytest.raises(RefusedError, match="cannot be read: Is a directory"):
        read_weights(str(tmp_path))


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
        "weights (DEFAULT): head classifier.1 has 1000 classes there and 10 here; it is re-initialised"
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


@pytest.mark.parametrize(("name", "border"), [("googlenet", 2), ("inception_v3", 0)])
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


def test_the_position_embedding_of_default_weights_fits_the_image_size(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = torchvision.models.VisionTransformer(64, 32, 1, 2, 8, 8)
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **__: donor)
    state = pretrained_weights("vit_b_32", image_size=96)
    assert state["encoder.pos_embedding"].shape == (1, 10, 8)
    assert_equal_states(pretrained_weights("vit_b_32", image_size=64), state_of(donor))


def test_default_weights_of_maxvit_are_for_multiples_of_224_pixels() -> None:
    with pytest.raises(UsageError, match="multiple of 224, not 96"):
        build_model("maxvit_t", num_classes=10, weights="DEFAULT", image_size=96)


@pytest.mark.skipif(not SHARED_WEIGHTS.exists(), reason="needs ../shared/data/resnet18-cifar100-64px-fp16.pt")
def test_the_pretrained_resnet18_loads_in_float32_with_or_without_its_head() -> None:
    saved = torch.load(SHARED_WEIGHTS, weights_only=True)
    assert saved["conv1.weight"].dtype == torch.float16
    whole = build_model("resnet18", num_classes=100, weights=str(SHARED_WEIGHTS), image_size=64)
    assert len(whole.notes) == 1
    assert_equal_states(
        {name: tensor.double() for name, tensor in state_of(whole.model).items()},
        {name: saved[name].double() for name in whole.model.state_dict()},
    )
    assert {parameter.dtype for parameter in whole.model.parameters()} == {torch.float32}
    part = build_model("resnet18", num_classes=10, weights=str(SHARED_WEIGHTS), image_size=64)
    (note,) = part.notes
    assert note.endswith("head fc has 100 classes there and 10 here; it is re-initialised")
    assert torch.equal(part.model.get_parameter("conv1.weight"), whole.model.get_parameter("conv1.weight"))
    with pytest.raises(RefusedError, match=r"do not fit ResNet: missing: layer1\.2"):
        build_model("resnet34", num_classes=100, weights=str(SHARED_WEIGHTS), image_size=64)


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
