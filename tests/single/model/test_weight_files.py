"""Files of weights as other programs write them: several states, prefixes, leftovers, positions, names and URLs."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.config.tree import from_dict
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.weight_names import place_of
from hvfreeze.model.weights import load_weights, pretrained_weights, read_state, weights_path
from hvfreeze.runs.identity import absolute_leaves
from hvfreeze.torchvision_shim import torchvision
from tests.single.model.states import assert_equal_states, squeezenet, state_of

State = dict[str, Tensor]


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def averaged(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
SAVED: dict[str, tuple[Callable[[State], Any], str]] = {
    "net": (lambda s: {"net": s, "acc": 0.9}, ""),
    "nested": (lambda s: {"checkpoint": {"model": s}}, ""),
    "an average beside": (
        lambda s: {"state_dict": s, "state_dict_ema": averaged(s), "optimizer": OPTIMIZER},
        "loading 'state_dict' of several states in the file, not 'state_dict_ema'",
    ),
    "an average first": (
        lambda s: {"model_ema": averaged(s), "model": s},
        "loading 'model' of several states in the file, not 'model_ema'",
    ),
    "Lightning": (
        lambda s: {"state_dict": {**under("model.", s), "criterion.weight": torch.ones(4)}, "epoch": 2, "loops": {}},
        "ignoring names that do not begin with model.: criterion.weight",
    ),
    "an average in Lightning": (
        lambda s: {"state_dict": {**under("ema.module.", averaged(s)), **under("net.", s)}},
        "ignoring names that do not begin with net.: ema.module",
    ),
    "compiled stages": (lambda s: {n.replace("features.3.", "features.3._orig_mod."): t for n, t in s.items()}, ""),
    "sharded over ranks": (
        lambda s: {f"_fsdp_wrapped_module.{n.replace('.3.', '.3._fsdp_wrapped_module.')}": t for n, t in s.items()},
        "",
    ),
    "a counter": (lambda s: {**s, "version": 3}, "version, which are not tensors"),
}


@pytest.mark.parametrize("how", SAVED)
def test_the_models_state_is_found_and_what_is_left_out_is_told(how: str, tmp_path: Path) -> None:
    saved, told = SAVED[how]
    file, donor = tmp_path / "weights.pt", state_of(squeezenet(10, seed=1))
    torch.save(saved(donor), file)
    built = build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)
    assert_equal_states(state_of(built.model), donor)
    *notes, _ = built.notes
    assert [told in note for note in notes] == [True] * bool(told), notes


PREFIXES = ("", "module.", "model.", "backbone.", "_orig_mod.", "_orig_mod.module.encoder.", "model.backbone.")
KEYS = ("", "state_dict", "model", "model_state_dict")


def test_every_usual_prefix_and_format_loads(tmp_path: Path) -> None:
    donor = state_of(squeezenet(10, seed=1))
    files = [safetensors(tmp_path / "model.safetensors", under("_orig_mod.module.", donor))]
    for prefix, key in zip_longest(PREFIXES, KEYS, fillvalue="state_dict"):
        files.append(tmp_path / f"weights-{prefix}{key}.bin")
        named = under(prefix, donor)
        torch.save({key: named} if key else named, files[-1])
    for file in files:
        built = build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)
        assert_equal_states(state_of(built.model), donor)


def test_a_head_outside_of_the_backbone_is_the_models(tmp_path: Path) -> None:
    file, donor = tmp_path / "weights.pt", state_of(squeezenet(10, seed=1))
    heads = ("classifier.1.weight", "classifier.1.bias")
    body = {name: tensor for name, tensor in donor.items() if name not in heads}
    torch.save({**under("backbone.", body), **{name: donor[name] for name in heads}}, file)
    built = build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)
    assert_equal_states(state_of(built.model), donor)


def test_a_head_of_another_name_is_left_out_and_told(tmp_path: Path) -> None:
    file, donor = tmp_path / "weights.pt", state_of(squeezenet(7, seed=1))
    torch.save({name.replace("classifier.1.", "linear."): tensor for name, tensor in donor.items()}, file)
    [note] = build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32).notes
    assert "ignoring a head of another name (linear.weight, linear.bias); classifier.1 is initialised" in note
    torch.save({**{n: t for n, t in donor.items() if "classifier" not in n}, "linear.weight": torch.zeros(7, 9)}, file)
    with pytest.raises(RefusedError, match=r"not part of the model: linear\.weight"):
        build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda s: {"student": s, "teacher": s}, "several states: 'student', 'teacher'; save the right one alone"),
        (lambda s: {"optimizer": OPTIMIZER, "epoch": 3}, "are not a state_dict"),
        (lambda s: {**under("model.", s), "model.extra": torch.zeros(1)}, "not part of the model: extra"),
        (lambda s: under("model.", dict(list(s.items())[4:])), r"missing: features\.0\.weight"),
    ],
)
def test_what_is_not_clear_is_refused(saved: Callable[[State], Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(saved(state_of(squeezenet(10, seed=1))), file)
    with pytest.raises(RefusedError, match=message):
        build_model("squeezenet1_1", num_classes=10, weights=str(file), image_size=32)


def safetensors(path: Path, state: State) -> Path:
    """As the library writes them."""
    header, content = dict[str, Any](), b""
    for name, tensor in state.items():
        data = tensor.float().contiguous().numpy().tobytes()
        place = [len(content), len(content) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": place}
        content += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "renamed.pt"])
def test_safetensors_ask_for_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = safetensors(tmp_path / name, {"fc.weight": torch.ones(2)})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    with pytest.raises(
        UsageError, match=r"are in safetensors format, which needs safetensors .*: pip install safetensors$"
    ):
        read_state(str(file))
    library = SimpleNamespace(load_file=lambda path: {"fc.weight": torch.ones(2)})
    monkeypatch.setitem(sys.modules, "safetensors", SimpleNamespace(torch=library))
    monkeypatch.setitem(sys.modules, "safetensors.torch", library)
    assert read_state(str(file))[0]["fc.weight"].tolist() == [1.0, 1.0]


def test_a_damaged_file_of_safetensors_is_refused(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "model.safetensors", {"fc.weight": torch.ones(100)})
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RefusedError, match="the file is damaged"):
        read_state(str(file))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_no_single_file_of_tensors_is_called_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"are a folder; name a weight file in it \(.*\.bin.*\); this one has none"):
        read_state(str(tmp_path))
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "traced.pt")
    with pytest.raises(RefusedError, match=r"a TorchScript archive holds code, and none was run; save them with"):
        read_state(str(tmp_path / "traced.pt"))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(RefusedError, match="an index of several weight files; save them as"):
        read_state(str(tmp_path / "model.safetensors.index.json"))
    with pytest.raises(RefusedError, match=r"are a folder; name a weight file in it, such as traced\.pt$"):
        read_state(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
        (b"<!doctype html><html>", "is a web page"),
    ],
)
def test_files_in_the_place_of_weights_are_called_what_they_are(tmp_path: Path, content: bytes, message: str) -> None:
    for name in ("weights.pt", "model.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RefusedError, match=message):
            read_state(str(tmp_path / name))


def vit(size: int) -> nn.Module:
    return torchvision.models.VisionTransformer(size, 8, 1, 2, 8, 8, num_classes=10)  # type: ignore[no-any-return]


def test_positions_of_a_file_are_made_for_the_image_size_as_torchvision_does() -> None:
    donor, model = vit(64), vit(32)
    notes = load_weights(model, donor.state_dict(), source="file")
    expected = torchvision.models.vision_transformer.interpolate_embeddings(32, 8, donor.state_dict())
    assert torch.equal(model.state_dict()["encoder.pos_embedding"], expected["encoder.pos_embedding"])
    assert notes[0] == "weights (file): encoder.pos_embedding is interpolated from 8x8 to 4x4 patches"
    assert len(load_weights(vit(64), donor.state_dict(), source="file")) == 1


class Patches(nn.Module):
    """A transformer of another library."""

    def __init__(self, positions: int, *, flat: bool = False) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn((positions, 6) if flat else (1, positions, 6)))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(2).mT + self.pos_embed)  # type: ignore[no-any-return]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_positions_of_other_transformers_keep_what_is_no_patch(tokens: int, flat: bool) -> None:
    donor, model = Patches(49 + tokens, flat=flat), Patches(25 + tokens, flat=flat)
    notes = load_weights(model, donor.state_dict(), source="file")
    assert "pos_embed is interpolated from 7x7 to 5x5 patches" in notes[0]
    there, here = (each.pos_embed.detach().reshape(-1, 6) for each in (donor, model))
    assert torch.equal(there[:tokens], here[:tokens])
    assert (here[tokens:].mean(0) - there[tokens:].mean(0)).abs().max() < 0.6


def test_positions_that_are_no_grid_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"of another shape: pos_embed \(1, 50, 6\) instead of \(1, 24, 6\)"):
        load_weights(Patches(24), Patches(50).state_dict(), source="file")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


NAMES = {
    "IMAGENET1K_V1": "resnet50-0676ba61.pth",
    "IMAGENET1K_V2": "resnet50-11ad3fa6.pth",
    "ResNet50_Weights.IMAGENET1K_V1": "resnet50-0676ba61.pth",
    "ResNet50_Weights.DEFAULT": "resnet50-11ad3fa6.pth",
    "DEFAULT": "resnet50-11ad3fa6.pth",
    "https://download.pytorch.org/models/resnet50-0676ba61.pth": "resnet50-0676ba61.pth",
}


@pytest.mark.parametrize("weights", NAMES)
def test_torchvisions_names_and_addresses_are_known(weights: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_path("resnet50", weights) == hub / NAMES[weights]
    asked, model = [], squeezenet(10)

    def get_model(name: str, *, weights: Any, progress: bool) -> nn.Module:
        asked.append((name, weights.url.rpartition("/")[2]))
        return model

    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    pretrained_weights("resnet50", weights=weights, image_size=64)
    assert asked == [("resnet50", NAMES[weights])]
    assert absolute_leaves({"weights": weights}) == {"weights": weights}


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("resnet18", "IMAGENET1K_V2", r"are not among those of resnet18, which has ResNet18_Weights\.IMAGENET1K_V1"),
        ("resnet18", "pretrained", r"cannot be read: No such file.*, DEFAULT, or a name .* such as IMAGENET1K_V1"),
        ("timm:resnet18", "IMAGENET1K_V1", "none, DEFAULT or a file with a model of timm's"),
        ("a:b", "ResNet18_Weights.DEFAULT", "none or a file with a custom model"),
    ],
)
def test_names_that_a_model_does_not_have_are_refused(model: str, weights: str, message: str) -> None:
    with pytest.raises(HvfreezeError, match=message):
        from_dict({"model": model, "weights": weights})
        build_model(model, num_classes=10, weights=weights, image_size=32)


def test_a_url_is_downloaded_once_into_a_file_of_its_own(hub: Path, tmp_path: Path) -> None:
    donor, served = state_of(squeezenet(10, seed=1)), tmp_path / "model.pt"
    torch.save(donor, served)
    url = served.as_uri()
    for _ in range(2):
        built = build_model("squeezenet1_1", num_classes=10, weights=url, image_size=32)
        assert_equal_states(state_of(built.model), donor)
        served.unlink(missing_ok=True)
    assert weights_path("squeezenet1_1", url) == place_of(url) and place_of(url).parent == hub
    assert place_of(url) != place_of("https://other.org/model.pt"), "of equal names"
    with pytest.raises(RefusedError, match=r"cannot be downloaded: .*; download the file and give its path"):
        build_model("squeezenet1_1", num_classes=10, weights=(tmp_path / "gone.pt").as_uri(), image_size=32)
