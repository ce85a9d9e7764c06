"""Every rank fits heads in a script, and as `hvfreeze auto` does it, on the same samples of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.inference.model import load_model
from hvfreeze.integration import fit_classifier, fit_head
from hvfreeze.model.model_sources import build_model
from hvfreeze.training.build import prepare
from hvfreeze.training.run import run
from tests.parallel.workers.checking import let_models_be_small, with_folder
from tests.parallel.workers.own_optimizer import raises

MODEL, SAMPLES = "resnet20", 100


def trained(classes: int = 10, weights: str = "none") -> nn.Module:
    torch.manual_seed(0)
    return build_model(MODEL, num_classes=classes, image_size=32, weights=weights).model


def as_auto(world: World, folder: Path, head: str) -> tuple[dict[str, Any], Any, DataLoader[Any], Tensor]:
    """Return the summary of `hvfreeze auto --epochs 1`, its model, a script's loader of its samples, and images."""
    weights = folder / "weights.pt"
    if world.rank == 0 and not weights.exists():
        torch.save(trained().state_dict(), weights)
    world.barrier(name="saved")
    settings = {"freeze": "auto", "epochs": 1, "model": MODEL, "weights": str(weights), "head": head}
    settings |= {"train_samples": SAMPLES, "threads": 1, "run_dir": str(folder / head)}
    summary = run(from_dict(settings), world)
    job = prepare(from_dict({**settings, "run_dir": str(folder / f"{head}-again")}), world)
    feed = job.factory.context.feed
    own = feed.plan.owned(feed.replica)
    seen = feed.shown(job.factory.augment(from_dict({"augment": "none"})), mirrors=False).images
    columns = (seen.load(own, np.zeros_like(own)), feed.images.labels[torch.from_numpy(own)])
    images = columns[0][:20]
    job.opened.model.close()
    return summary, load_model(folder / head), DataLoader(TensorDataset(*columns), batch_size=32), images


def compare(said: Tensor, wanted: Tensor, *, within: float, classes: bool = True) -> None:
    difference = float((said - wanted).norm() / (wanted - wanted.mean(0)).norm())
    assert difference < within, (difference, said[:3], wanted[:3])
    assert not classes or said.argmax(1).equal(wanted.argmax(1)), (said, wanted)


@with_folder
def check_a_fitted_last_layer_is_that_of_auto(world: World, folder: Path) -> None:
    summary, applied, loader, images = as_auto(world, folder, "last")
    model = trained(weights=str(folder / "weights.pt"))
    with scripts_of(world):
        chosen = fit_head.fit_head(model, loader)
        assert abs(chosen.penalty - summary["head"]["penalty"]) < 1e-12, (chosen.penalty, summary["head"])
    assert chosen.rows == SAMPLES and check_replicas(model, world, step=0)
    with torch.no_grad():
        # Logistic regression ends within a tenth of the exact coefficients.
        compare(model.eval()(images), applied.logits(images), within=0.1)


def check_heads_are_those_of_one_rank_whoever_has_which_samples(world: World) -> None:
    random = torch.Generator().manual_seed(2)
    images, weights = torch.randn(60, 3, 8, 8, generator=random), (torch.arange(60) % 4).float()
    colours = images.mean((2, 3))
    truths = {"classes": colours.argmax(1), "numbers": 50 * colours + 7}
    for task, truth in truths.items():
        given: dict[str, Any] = {"task": task, "penalty": 0.1}
        given |= {"class_weights": "balanced"} if task == "classes" else {}
        heads: dict[str, list[Tensor]] = {"layer": [], "classifier": []}
        for ranks, own in ((world, slice(world.rank, None, world.size)), (SoloWorld(), slice(None))):
            loader = DataLoader(TensorDataset(images[own], truth[own]), batch_size=16)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
            with scripts_of(ranks), torch.no_grad():
                fitted = fit_classifier.fit_classifier(model, loader, sample_weight=weights[own], **given)
                heads["classifier"].append(fitted.classifier.eval()(images))
                fit_head.fit_head(model, loader, sample_weight=weights[own], **given)
                heads["layer"].append(model(images))
        assert fitted.fit.rows == int((weights > 0).sum())
        compare(*heads["classifier"], within=1e-3, classes=task == "classes")
        compare(*heads["layer"], within=0.1, classes=task == "classes")
    wrong = truths["classes"] + (world.rank == world.size - 1)
    loader = DataLoader(TensorDataset(images, wrong), batch_size=16)
    with scripts_of(world):
        raises(UsageError, "a label is 3", lambda: fit_head.fit_head(model, loader))


@contextmanager
def scripts_of(world: World) -> Iterator[None]:
    """Let scripts run among the ranks of `world`."""
    with (
        patch.object(fit_head, "script_world", lambda _: world),
        patch.object(fit_classifier, "script_world", lambda _: world),
    ):
        yield


@with_folder
def check_a_fitted_classifier_is_that_of_auto(world: World, folder: Path) -> None:
    summary, applied, loader, images = as_auto(world, folder, "multi-level")
    model = trained(weights=str(folder / "weights.pt")).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with scripts_of(world):
        fitted = fit_classifier.fit_classifier(model, loader)
    assert abs(fitted.fit.penalty - summary["head"]["penalty"]) < 1e-12, (fitted.fit.penalty, summary["head"])
    assert fitted.fit.rows == SAMPLES and check_replicas(fitted.classifier, world, step=0)
    assert model.training and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        compare(fitted.classifier.eval()(images), applied.logits(images), within=0.01)


def setting(world: World, root: Path) -> World:
    let_models_be_small()
    return world
