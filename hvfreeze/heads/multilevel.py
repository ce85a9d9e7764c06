"""A classifier whose linear head reads every block of a chain, as one module that loads and exports like any other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hvfreeze.chain.blocks import Chain
from hvfreeze.errors import RefusedError
from hvfreeze.heads.features import EveryBlock
from hvfreeze.heads.fit import HeadFit


class MultiLevelClassifier(nn.Module):
    """Images, (B, C, H, W), to logits, (B, classes), by every block of a chain and one linear layer on all of them.

    The chain's own head is kept where its parameters are, unused, so that the body loads wherever the model did.
    Standardisation is part of the linear layer. `state_dict()` has the model's entries under `body.`, the layer's as
    `head.weight`, (classes, D), and `head.bias`, (classes,).

        classifier = MultiLevelClassifier(chain, classes=10, pool=4, example=images)
        classifier.load_state_dict(torch.load("model.pt", weights_only=True))
    """

    def __init__(self, chain: Chain, *, classes: int, pool: int, example: Tensor) -> None:
        """Take a chain, whose model becomes part of this module; `example`, (B, ...), tells the number of features."""
        super().__init__()
        self.body = chain.model
        self._features = EveryBlock(chain, pool=pool)
        self.head = nn.Linear(self.width(example), classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return every block's features, (B, D) float32."""
        return self._features(images)

    @torch.no_grad()
    def width(self, example: Tensor) -> int:
        """Return D for images like `example`, (B, ...). Nothing in the module changes."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            return self.features(example).shape[1]
        finally:
            for module, mode in modes.items():
                module.training = mode

    @torch.no_grad()
    def take(self, fit: HeadFit) -> None:
        """Make the solved head this module's."""
        self.head.weight.copy_(fit.weight)
        self.head.bias.copy_(fit.bias)


def export(classifier: nn.Module, path: Path | str, *, example: Tensor) -> None:
    """Write `classifier` in evaluation mode to `path`, a file that runs without hvfreeze.

        logits = torch.export.load("classifier.pt2").module()(images)

    Args:
        classifier: a module from images, (B, C, H, W), to logits, (B, classes).
        path: ends in `.pt2`; replaced where it exists.
        example: images, (B, C, H, W), at least two; the file takes any number of images of their size.

    Raises:
        RefusedError: torch cannot follow the module's arithmetic, or the file cannot be written.
    """
    modes = {module: module.training for module in classifier.modules()}
    classifier.eval()
    try:
        with torch.no_grad():
            batch = {0: torch.export.Dim("batch", min=1)}
            program = torch.export.export(classifier, (example,), dynamic_shapes=(batch,))
        torch.export.save(program, path)
    except (RuntimeError, OSError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        raise RefusedError(f"{path}: {type(classifier).__name__} cannot be exported: {error}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
