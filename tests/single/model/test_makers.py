"""Models by package:function and of timm, for which a library of the same face stands here."""

from __future__ import annotations

import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.config.tree import from_dict
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.model_sources import build_model, timm_statistics
from hvfreeze.model.weights import head_layers
from hvfreeze.user_code import code_sha256

CODE = """
import torch
from torch import nn
from hvfreeze.model.blocks import Chain, cut_into_blocks

def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, num_classes))

def sized(num_classes, image_size, **rest):
    assert image_size == 4 and not rest
    return nn.Linear(image_size, num_classes)

def written(num_classes):
    net = plain(num_classes)
    return Chain.from_modules(net, [("a", [net[0], net[1]]), ("b", net[2])])

def fails(num_classes):
    raise KeyError("nothing here")

def odd(num_classes):
    return 3

def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

def deep(num_classes):
    return plain(num_classes).forgotten
"""


OWN_MODULES = ("parts_of_mine", "other_parts", "middle_part")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `parts_of_mine` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN_MODULES]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "parts_of_mine.py").write_text(CODE)
    return tmp_path / "parts_of_mine.py"


def made(name: str, **settings: Any) -> Any:
    return build_model(name, num_classes=5, image_size=4, **settings)


def test_a_function_makes_the_model_from_what_it_asks_for(code: Path, tmp_path: Path) -> None:
    assert made("parts_of_mine:plain").model[2].out_features == 5
    assert made("parts_of_mine:sized").model.in_features == 4
    built = made("parts_of_mine:written")
    assert isinstance(built.chain, Chain) and built.chain.model is built.model and len(built.chain.blocks) == 2
    torch.save({"1.weight": torch.ones(8, 48), "1.bias": torch.ones(8)}, tmp_path / "w.pt")
    loaded = made("parts_of_mine:plain", weights=str(tmp_path / "w.pt"))
    assert loaded.model[1].weight.eq(1).all() and "no head 2" in loaded.notes[0]


@pytest.mark.parametrize(
    ("imports", "other"),
    [
        ("from other_parts import this", "other_parts.py"),
        ("from other_parts import inner", "other_parts/__init__.py"),
        ("import middle_part", "other_parts/deep/inner.py"),
    ],
)
def test_code_is_told_apart_by_the_files_that_its_file_imports(code: Path, imports: str, other: str) -> None:
    """Helpers of a model's file change the model as its own file does; installed packages have versions."""
    code.write_text(f"{CODE}\n{imports}\n")
    (code.parent / "middle_part.py").write_text("from other_parts.deep.inner import this")
    path = code.parent / other
    for folder in (path.parent, path.parent.parent):
        if folder.is_relative_to(code.parent) and folder != code.parent:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text("from . import inner\n" if folder == path.parent else "")
            (folder / "inner.py").write_text("this = 1\n")
    path.write_text("this = 1\n")
    first = code_sha256("model", "parts_of_mine:plain")
    assert first == code_sha256("model", "parts_of_mine:plain")
    path.write_text("this = 2\n")
    assert first != code_sha256("model", "parts_of_mine:plain")
    code.write_text(CODE)
    assert code_sha256("model", "parts_of_mine:plain") == hashlib.sha256(CODE.encode()).hexdigest()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parts_of_mine:fails", r"failed: KeyError: 'nothing here' \(parts_of_mine.py, line 18\)"),
        ("parts_of_mine:odd", "must return an nn.Module or a hvfreeze.model.blocks.Chain, not int"),
        ("parts_of_mine:lazy", r"with initialised parameters, and 1\.weight has no size yet; run the model once"),
        ("parts_of_mine:plane", "has no function plane; did you mean 'plain'"),
        (
            "no_such_module_here:f",
            r"no module no_such_module_here; put no_such_module_here.py into the working directory",
        ),
        ("a b:c", "must be package:function"),
        ("timm:resnet18", "needs the timm library"),
    ],
)
def test_what_makes_no_model_is_refused_in_one_line(
    code: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=message) as refusal:
        made(name)
    assert "\n" not in str(refusal.value)


def test_settings_are_checked_before_anything_is_imported() -> None:
    with pytest.raises(UsageError, match=r"--model \(a-b:c\) must be package:function"):
        from_dict({"model": "a-b:c"})
    with pytest.raises(UsageError, match=r"--data \(x:\) must be package:function"):
        from_dict({"data": "x:"})
    with pytest.raises(UsageError, match=r"--weights \(DEFAULT\) must be none or a file"):
        from_dict({"model": "a.b:c", "weights": "DEFAULT"})
    assert from_dict({"model": "timm:vit_tiny", "weights": "DEFAULT", "data": "a.b:c"}).model.model == "timm:vit_tiny"


class Sized(nn.Sequential):
    """Takes an image size, like a transformer."""


def fake_timm() -> Any:
    def create_model(name: str, *, num_classes: int = 7, pretrained: bool = False, **more: int) -> nn.Module:
        if name == "broken":
            raise RuntimeError("no network")
        if name == "plain" and more:
            raise TypeError("img_size")
        model = Sized(nn.Flatten(), nn.Linear(48, 6), nn.Linear(6, num_classes))
        if pretrained:
            nn.init.ones_(model[1].weight)  # type: ignore[arg-type]
        return model

    config = types.SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    return types.SimpleNamespace(
        __version__="0",
        create_model=create_model,
        is_model=lambda name: name in ("plain", "sized", "broken"),
        get_pretrained_cfg=lambda name: config if name == "plain" else None,
    )


def test_timms_models_weights_and_statistics_come_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", fake_timm())
    for name in ("timm:plain", "timm:sized"):
        built = made(name, weights="DEFAULT")
        weight: Tensor = built.model[1].weight
        assert weight.eq(1).all() and built.model[2].out_features == 5 and "initialised at random" in built.notes[0]
    assert timm_statistics("timm:plain") == ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)) and timm_statistics("timm:sized") is None
    with pytest.raises(UsageError, match="is not a model of timm 0"):
        made("timm:other")
    with pytest.raises(UsageError, match="must be timm:NAME"):
        made("timm:hf-hub:some/where")
    with pytest.raises(UsageError, match="no network"):
        made("timm:broken")
    with pytest.raises(RefusedError, match=r"weights \(DEFAULT\) of timm:broken cannot be downloaded|cannot be built"):
        from hvfreeze.model.model_sources import timm_weights

        timm_weights("timm:broken", image_size=4)


def test_a_transformer_of_timm_that_pools_by_attention_is_cut_with_that_in_its_head() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled: Tensor = (self.query(x).softmax(1) * x).sum(1)
            return pooled

    class VisionTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Sequential(nn.Conv2d(3, 6, 2, stride=2), nn.Flatten(2))
            self.position = nn.Parameter(torch.randn(4, 6))
            self.pos_drop, self.patch_drop, self.norm_pre = nn.Identity(), nn.Identity(), nn.Identity()
            self.blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
            self.norm, self.attn_pool, self.fc_norm = nn.LayerNorm(6), Pool(), nn.LayerNorm(6)
            self.head_drop, self.head = nn.Identity(), nn.Linear(6, 5)

        def _pos_embed(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2) + self.position

        def forward_head(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.head_drop(self.fc_norm(self.attn_pool(x))))
            return logits

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
            return self.forward_head(self.norm(self.blocks(x)))

    VisionTransformer.__module__ = "timm.models.vision_transformer"
    VisionTransformer.__qualname__ = "VisionTransformer"
    model = VisionTransformer()
    chain = cut_into_blocks(model, example=torch.rand(2, 3, 4, 4))
    assert chain.blocks[-1].parameter_names[2:4] == ("attn_pool.query.weight", "attn_pool.query.bias")
    assert head_layers(model) == ["head"]
