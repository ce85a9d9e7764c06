"""`hvfreeze.fit_classifier` alone: what it fits, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hvfreeze
from hvfreeze.comm.world import SoloWorld
from hvfreeze.errors import UsageError
from hvfreeze.integration.optimizer import DistributedOptimizer
from tests.hub_models import save_small


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(96, outputs))


def data(rows: int = 240) -> tuple[Tensor, Tensor]:
    """Images whose class is the brightest channel."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 8, 8, generator=random) + 0.5 * torch.randn(rows, 3, 1, 1, generator=random)
    return images, images.mean((2, 3)).argmax(1)


def batches(*columns: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*columns), batch_size=32)


@torch.no_grad()
def test_a_head_on_all_blocks_answers_what_the_last_layer_cannot() -> None:
    model, (images, labels) = network(), data()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitted = hvfreeze.fit_classifier(model.train(), batches(images, labels))
    assert fitted.fit.rows == 240 and fitted.fit.chosen is not None and fitted.fit.chosen.held_out_accuracy > 0.7
    assert model.training and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    others, wanted = data(340)
    said = fitted.classifier.eval()(others[240:]).argmax(1)
    assert float((said == wanted[240:]).float().mean()) > 0.7
    again = hvfreeze.fit_classifier(model, batches(images, labels), flips=True, pool=1, penalty=0.1, outputs=5)
    assert again.fit.rows == 480 and again.classifier(images[:2]).shape == (2, 5)


def test_numbers_labels_and_class_weights() -> None:
    model, (images, labels) = network(), data()
    numbers = images.mean((2, 3)) * 5 + 100
    found = hvfreeze.fit_classifier(model, batches(images, numbers), task="numbers")
    assert found.fit.chosen is not None and found.fit.chosen.held_out_accuracy > 0.7
    # In the units of the labels, whose mean is 100.
    with torch.no_grad():
        assert float((found.classifier.eval()(images) - numbers).abs().mean()) < float(numbers.std()) / 2
    fit = hvfreeze.fit_classifier(model, batches(images, (numbers > 100).float()), task="labels").fit
    assert fit.chosen is not None and fit.chosen.held_out_accuracy > 0.7
    # One image in ten has another class than it looks like, and two classes of three are rare.
    labels = torch.where(torch.arange(len(labels)) % 10 == 0, (labels + 1) % 3, labels)
    kept = (labels == 0) | (torch.arange(len(labels)) % 4 == 0)
    weighted, plain = (
        hvfreeze.fit_classifier(model, batches(images[kept], labels[kept]), class_weights=weights).classifier.eval()
        for weights in ("balanced", None)
    )
    with torch.no_grad():
        assert not plain.head.bias.any() and float(weighted.head.bias[0]) < float(weighted.head.bias[1:].min())
        assert int((weighted(images).argmax(1) == 0).sum()) < int((plain(images).argmax(1) == 0).sum())


@torch.no_grad()
def test_a_sample_of_weight_0_does_not_count() -> None:
    model, (images, labels) = network(), data()
    kept, found = labels > 0, []
    for columns, weight in (((images, labels), kept.float()), ((images[kept], labels[kept]), None)):
        fitted = hvfreeze.fit_classifier(model, batches(*columns), sample_weight=weight)
        found.append(fitted.classifier.eval()(images))
    assert torch.equal(*found)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.fc = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.part(x)) if float(x.sum()) > 0 else self.part(x)
        return y


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (network(), {"task": "boxes"}, r"task \(boxes\) must be one of"),
        (network(), {"tokens": "last"}, r"tokens \(last\) must be one of mean, class, grid"),
        (network(2), {}, "a label is 2, and the last layer has 2 outputs"),
        (TwoInputs(), {}, "its forward pass"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), {}, "does not end in a linear layer|only one block"),
    ],
)
def test_what_cannot_be_fitted_is_refused(model: nn.Module, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hvfreeze.fit_classifier(model, batches(*data(64)), **options)  # type: ignore[arg-type]


def test_a_loader_without_batches_or_images_is_refused() -> None:
    with pytest.raises(UsageError, match="has no batches"):
        hvfreeze.fit_classifier(network(), [])
    with pytest.raises(UsageError, match="has no tensor of images; give split="):
        hvfreeze.fit_classifier(network(), [({"images": data(8)[0]}, data(8)[1])])


@pytest.mark.parametrize("mode", [True, False])
def test_frozen_blocks_keep_the_mode_that_the_script_asked_for(mode: bool) -> None:
    model, (images, labels) = network(), data(64)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=SoloWorld())
    optimizer.freezer.freeze(1)
    model.train(mode)
    hvfreeze.fit_classifier(model, batches(images, labels))
    model(images).sum().backward()
    optimizer.step()
    optimizer.freezer.thaw(0)
    assert [module.training for module in model.modules()] == [mode] * 8


def test_a_classifier_of_transformers_is_fitted_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = save_small("vit", tmp_path)
    images = torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    fitted = hvfreeze.fit_classifier(model, batches(images, torch.arange(60) % 3))
    assert fitted.fit.rows == 60 and fitted.classifier(images[:2]).shape == (2, 7)
