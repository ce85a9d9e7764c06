"""The weights that a model starts with: read without running code, fitted, or refused by name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.heads.multilevel import MultiLevelClassifier
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.mlp import Mlp, replace_head
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.weights import head_layers, load_weights, read_weights
from hvfreeze.torchvision_shim import torchvision
from tests.single.model.states import assert_equal_states, squeezenet, state_of

TRACKED = "head.norm.num_batches_tracked"


SAVED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "half precision": lambda state: {name: t.half() if t.is_floating_point() else t for name, t in state.items()},
    "before BatchNorm counted": lambda state: {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize(("name", "how"), [*zip(["shufflenet_v2_x0_5", "mnasnet0_5"], SAVED, strict=True)])
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
    assert "is kept, with 10 classes" in note


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
    assert (
        note
        == f"weights ({file}): head classifier.1 is initialised at random: the weights have 4 classes, the model 10"
    )


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


def test_weights_that_are_not_finite_are_refused_before_training(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    state = state_of(squeezenet(10))
    state["features.3.squeeze.bias"][1] = float("inf")
    torch.save(state, file)
    with pytest.raises(RefusedError, match=r"hold NaN or Inf, as float32, in features\.3\.squeeze\.bias"):
        build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_precisions_are_refused_only_where_float32_cannot_hold_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"fc.weight": torch.tensor([1.5, -2.0], dtype=dtype)}, file)
    assert read_weights(str(file))["fc.weight"].tolist() == [1.5, -2.0]
    torch.save({"fc.weight": torch.tensor([1.5, 1e300], dtype=dtype)}, file)
    with pytest.raises(RefusedError, match=r"hold NaN or Inf, as float32, in fc\.weight"):
        read_weights(str(file))


@pytest.mark.filterwarnings("ignore")  # torch means to give up quantised tensors
@pytest.mark.parametrize(
    "change",
    [
        lambda ones: ones.to(torch.float8_e5m2),
        lambda ones: ones.to_sparse(),
        lambda ones: ones.to("meta"),
        lambda ones: torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
    ],
    ids=["float8", "sparse", "meta", "quantised"],
)
def test_tensors_that_no_model_can_copy_are_refused_by_name(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"fc.bias": torch.zeros(2), "fc.weight": change(torch.ones(2))}, file)
    with pytest.raises(RefusedError, match=r"8-bit floats in fc\.weight; save them as dense float32") as refusal:
        read_weights(str(file))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("head", ["last", "mlp-4"])
def test_a_head_of_another_kind_is_left_out_and_starts_afresh(head: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.manual_seed(1)
    donor = state_of(build_model("resnet20", num_classes=10, image_size=32, head="mlp-8").model)
    torch.save(donor, file)
    torch.manual_seed(2)
    fresh = state_of(build_model("resnet20", num_classes=10, image_size=32, head=head).model)
    torch.manual_seed(2)
    built = build_model("resnet20", num_classes=10, weights=str(file), image_size=32, head=head)
    found = state_of(built.model)
    assert_equal_states(found, {name: fresh[name] if name.startswith("fc.") else donor[name] for name in found})
    (note,) = built.notes
    kind = "ignoring a head of another type (fc.hidden1.linear.weight, fc.hidden1.norm.weight, fc.hidden1.norm.bias and"
    assert note.startswith(f"weights ({file}): {kind}") and note.endswith("is initialised at random")
    torch.save({**donor, "fc.weight": fresh["conv1.weight"]}, file)
    with pytest.raises(RefusedError, match=r"not part of the model: fc\.hidden1"):
        build_model("resnet20", num_classes=10, weights=str(file), image_size=32)


@pytest.mark.parametrize(("classes", "reset"), [(4, False), (10, True)], ids=["other classes", "reset"])
def test_the_norm_behind_the_last_layer_starts_afresh_with_it(classes: int, reset: bool, tmp_path: Path) -> None:
    file, made = tmp_path / "weights.pt", partial(build_model, "mlp-6", image_size=4)
    torch.manual_seed(1)
    trained = made(num_classes=classes).model
    trained(torch.randn(8, 3, 4, 4))
    torch.save(donor := state_of(trained), file)
    torch.manual_seed(2)
    fresh = state_of(made(num_classes=10).model)
    torch.manual_seed(2)
    built = made(num_classes=10, weights=str(file), reset_head=reset)
    of_head = [name for name in fresh if name.startswith("head.") and not name.endswith("num_batches_tracked")]
    assert of_head == ["head.linear.weight", "head.norm.running_mean", "head.norm.running_var"]
    assert_equal_states(without(state_of(built.model), TRACKED), {**without(donor, TRACKED), **only(fresh, *of_head)})
    assert "head head.linear" in built.notes[0] and "initialised at random" in built.notes[0]


@pytest.mark.parametrize("head", ["kernel", "linear"])
def test_the_body_beside_a_multi_level_head_loads_and_the_models_own_head_starts_afresh(head: str) -> None:
    torch.manual_seed(1)
    donor, example = squeezenet(4), torch.zeros(2, 3, 32, 32)
    chain = cut_into_blocks(donor)
    classifier = MultiLevelClassifier(chain, classes=4, pool=1, example=example, kernel=head == "kernel")
    for classes in (4, 10):
        model = squeezenet(classes, seed=2)
        fresh, heads = state_of(model), ("classifier.1.weight", "classifier.1.bias")
        notes = load_weights(model, classifier.state_dict(), source="run")
        assert_equal_states(state_of(model), {**state_of(donor), **only(fresh, *heads)})
        assert ["ignoring the multi-level head" in notes[0], "no head classifier.1" in notes[1]] == [True, True]


class Cosine(nn.Module):
    """A last layer that is no Linear."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, 5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x) @ self.weight.T


def cosine() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), Cosine(4))


@pytest.mark.parametrize("written_out", [False, True])
def test_a_layer_of_the_body_is_never_taken_for_the_head(written_out: bool) -> None:
    donor, model = cosine().state_dict(), cosine()
    parts = [("body", [model[0], model[1]]), ("head", model[2])]
    chain = Chain.from_modules(model, parts) if written_out else None
    assert load_weights(model, donor, source="file", chain=chain) == []
    assert_equal_states(state_of(model), donor)
    with pytest.raises(
        UsageError, match=r"--reset-head needs a last block with a Linear or a convolution, and Sequential has neither"
    ):
        load_weights(model, donor, source="file", reset_head=True, chain=chain)
    assert_equal_states(state_of(model), donor)


def damaged(change: Callable[[dict[str, Any]], Any]) -> Any:
    return change(state_of(squeezenet()))


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if name not in names}


def only(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: state[name] for name in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: without(s, "features.0.bias"),
            r"do not fit SqueezeNet; choose the --model that they belong to \(missing: features\.0\.bias",
        ),
        (lambda s: {**s, "extra.weight": torch.zeros(1)}, r"not part of the model: extra\.weight"),
        (
            lambda s: {**s, "features.0.bias": torch.zeros(3)},
            r"of another shape: features\.0\.bias \(3,\) instead of \(64,\)",
        ),
        (
            lambda s: torchvision.models.shufflenet_v2_x0_5().state_dict(),
            r"missing: features.*not part of the model: conv1",
        ),
        (lambda s: {}, "are not a state_dict"),
        (lambda s: {"features.0.bias": 3}, "are not a state_dict"),
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


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
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
        RefusedError, match=r"weights\.pt\) are refused: loading them would run code \(posix\.mkdir\); none was"
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


class HeadFirst(nn.Module):
    """Its layers are defined in another order than they are called in."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, classes), nn.BatchNorm1d(classes)
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(self.conv2(self.conv1(x).relu()).mean((2, 3))))  # type: ignore[no-any-return]


class HeadAlone(HeadFirst):
    """Its last matrix is in no layer."""

    def __init__(self) -> None:
        super().__init__(4)
        self.matrix = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.matrix


def test_the_head_is_what_is_called_last() -> None:
    model = HeadFirst(5)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    notes = load_weights(model, state, source="file", reset_head=True)
    assert notes == ["weights (file): head fc is initialised at random (--reset-head)"]
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])}
    assert changed == {"fc.weight", "fc.bias"}
    replace_head(model, "mlp-8")
    assert isinstance(model.fc, Mlp)
    assert head_layers(HeadAlone()) == []
