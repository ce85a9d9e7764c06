"""ViT, Swin and ConvNeXt in tiny sizes: from weights, with AdamW, frozen by vote, cached."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvfreeze
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.model.weights import load_weights, read_weights
from hvfreeze.torchvision_shim import torchvision

EPOCHS, ROWS, SAMPLES = 5, 8, 32


def vision_transformer(classes: int) -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    model: nn.Module = torchvision.models.VisionTransformer(**sizes, dropout=0.1, num_classes=classes)
    return model


def swin(classes: int) -> nn.Module:
    sizes = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [2, 2]}
    model: nn.Module = torchvision.models.SwinTransformer(**sizes, stochastic_depth_prob=0.2, num_classes=classes)
    return model


def convnext(classes: int) -> nn.Module:
    block = torchvision.models.convnext.CNBlockConfig
    stages = [block(8, 12, 1), block(12, 16, 2), block(16, None, 1)]
    model: nn.Module = torchvision.models.ConvNeXt(stages, stochastic_depth_prob=0.2, num_classes=classes)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {"vit": vision_transformer, "swin": swin, "convnext": convnext}


def samples() -> TensorDataset:
    """Stripes in three directions, in noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % 3
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    stripes = torch.stack([rows % 4 < 2, columns % 4 < 2, (rows + columns) % 4 < 2]).float()
    noise = torch.randn(SAMPLES, 3, 16, 16, generator=generator) / 4
    return TensorDataset(stripes[labels][:, None] + noise, labels)


def fine_tune(name: str, weights: Path, directory: Path, *, store: bool) -> tuple[nn.Module, Any, Any, list[float]]:
    torch.manual_seed(1)
    model = MODELS[name](3)
    load_weights(model, read_weights(str(weights)), source=weights.name)
    loader = DataLoader(samples(), batch_size=ROWS, shuffle=True)
    votes = FreezeConfig(freeze="percentile", eta_max=math.inf, interval=2, freeze_warmup=4)
    optimizer = hvfreeze.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        model=model,
        steps_per_epoch=len(loader),
        num_epochs=EPOCHS,
        settings=votes,
        world=SoloWorld(),
    )
    cached = hvfreeze.CachedLoader(loader, optimizer, directory=directory, store=store)
    losses = []
    for _ in range(EPOCHS):
        model.train()
        for activations, labels in cached:
            loss = functional.cross_entropy(cached.suffix(activations), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    cached.close()
    return model, optimizer.freezer, cached, losses


@pytest.mark.parametrize(
    "name", ["convnext", *(pytest.param(name, marks=pytest.mark.seldom) for name in ("vit", "swin"))]
)
def test_a_transformer_or_convnext_fine_tunes_frozen_by_vote_and_cached(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pretrained = MODELS[name](7)
    weights = tmp_path / "weights.pt"
    torch.save(pretrained.state_dict(), weights)
    model, freezer, loader, losses = fine_tune(name, weights, tmp_path / "cache", store=True)
    reference, other, _, expected = fine_tune(name, weights, tmp_path / "none", store=False)
    assert freezer.cut > 0 and loader.rows_read > 0 and loader.exact
    assert freezer.cut_history == other.cut_history and losses == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    frozen = [name for name, _ in freezer.chain.named_parameters(0, freezer.cut)]
    assert not any(model.get_parameter(name).requires_grad for name in frozen)
    assert sum(losses[-4:]) < sum(losses[:4])
