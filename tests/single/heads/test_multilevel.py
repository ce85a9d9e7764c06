"""A classifier with a head on every block loads; `inference/test_exporting.py` runs it from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.head import HeadConfig
from hvfreeze.heads.kernel import fit_kernel
from hvfreeze.heads.linear import fit_linear
from hvfreeze.heads.multilevel import MultiLevelClassifier, head_of, solvable_chain, take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.tasks import Classes
from tests.single.heads.test_features import small_chain


@pytest.mark.parametrize("kernel", [False, True])
def test_fitted_classifiers_load(kernel: bool, tmp_path: Path) -> None:
    save_fitted(tmp_path, kernel=kernel)


def save_fitted(folder: Path, *, kernel: bool) -> tuple[MultiLevelClassifier, Tensor, Tensor]:
    """Fit a classifier; see that its state makes another one the same; return it with images and its answers."""
    chain, images = small_chain(), torch.randn(60, 3, 8, 8)
    classifier = MultiLevelClassifier(chain, classes=3, pool=2, example=images[:2], kernel=kernel)
    assert classifier.training and chain.model[0][1].num_batches_tracked == 0, "counting features changes nothing"
    classifier.eval()
    task, world = Classes(3), SoloWorld()
    with torch.no_grad():
        features = classifier.features(images)
        labels = features[:, :3].argmax(1)
        rows = RowsInMemory(features, labels, torch.arange(60) % 5 == 0)
        if kernel:
            assert not classifier(images).any(), "until it is fitted, the head says nothing"
            take(classifier.head, fit_kernel(rows, task=task, world=world, memory_bytes=2**24))
            logits = classifier(images)
        else:
            fit = fit_linear(rows, task=task, world=world, penalties=[1e-3])
            take(classifier.head, fit)
            logits = classifier(images)
            torch.testing.assert_close(logits, features @ fit.weight.t() + fit.bias)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not kernel or torch.equal(classifier.head(features), logits)
    assert (logits.argmax(1) == labels).float().mean() > 0.9

    torch.save(classifier.state_dict(), folder / "model.pt")
    other = MultiLevelClassifier(small_chain(), classes=3, pool=2, example=images[:2], kernel=kernel)
    other.eval().load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    with torch.no_grad():
        assert torch.equal(other(images), logits)
    return classifier, images, logits


@pytest.mark.parametrize("head", ["last", "multi-level"])
def test_a_solvable_chain_is_the_model_in_two_blocks(head: str) -> None:
    """Features then head; for `last` it gives the model's own logits and owns the model's own names."""
    chain = small_chain()
    images = torch.randn(2, 3, 8, 8)
    solvable = solvable_chain(chain, HeadConfig(head=head, head_fit="exact", pool=2), classes=3, example=images)
    solvable.model.eval()
    assert [block.name for block in solvable.blocks] == ["features", "head"]
    features = solvable.run(images, 0, 1)
    assert torch.equal(head_of(solvable)(features), solvable.model(images))
    names = [name for name, _ in solvable.named_parameters()]
    assert len(set(names)) == len(names)
    assert {id(tensor) for _, tensor in solvable.named_parameters(1)} == {id(p) for p in head_of(solvable).parameters()}
    body = {id(p) for block in chain.blocks[:-1] for p in map(chain.model.get_parameter, block.parameter_names)}
    assert body == {id(tensor) for _, tensor in solvable.named_parameters(0, 1)}
    assert len(solvable.named_buffers()) == len([*chain.model.buffers()])
    assert not any(module is head_of(solvable) for module in solvable.modules(0, 1))
    if head == "last":
        assert solvable.model is chain.model
        assert torch.equal(solvable(images), chain(images))
