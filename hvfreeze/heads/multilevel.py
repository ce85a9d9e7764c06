"""Models with a fitted head, as chains of two blocks: the frozen features and one layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvfreeze.config.head import HeadConfig
from hvfreeze.heads.features import MeanWithMirrorImage, before_last_layer, every_block
from hvfreeze.heads.kernel import KernelFit, KernelHead
from hvfreeze.heads.linear import HeadFit
from hvfreeze.model.blocks import Block, Chain
from hvfreeze.model.modes import in_evaluation

SolvableHead = nn.Linear | KernelHead


class MultiLevelClassifier(nn.Module):
    """A classifier with one layer on the features of all blocks of a chain, from (B, C, H, W) to (B, classes).

    The chain's own head stays in the model, unused, so that the body's state fits the original model. Standardisation
    is part of the linear layer. `state_dict()` has the model's entries under `body.`, the layer's as
    `head.weight`, (classes, D), and `head.bias`, (classes,); with `kernel` the layer is a `KernelHead`.

        classifier = MultiLevelClassifier(chain, classes=10, pool=4, example=images)
        classifier.load_state_dict(torch.load("model.pt", weights_only=True))
    """

    head: SolvableHead

    def __init__(
        self,
        chain: Chain,
        *,
        classes: int,
        pool: int,
        example: Tensor,
        kernel: bool = False,
        reads_mirrored: bool = False,
        tokens: str = "mean",
    ) -> None:
        """Take a chain, whose model becomes part of this module; `example`, (B, ...), determines the number of
        features.

        With `reads_mirrored`, features are averaged over horizontal flips. For `tokens` see `every_block`.
        """
        super().__init__()
        self.body = chain.model
        read = every_block(chain, pool=pool, example=example, tokens=tokens)
        self.reads_mirrored = reads_mirrored
        self._features = MeanWithMirrorImage(read) if reads_mirrored else read
        self._body_chain = chain
        width = self._width(example)
        self.head = KernelHead(width, classes) if kernel else nn.Linear(width, classes)
        with torch.no_grad():
            # Zeros instead of random weights: before the fit all logits are equal.
            for parameter in self.head.parameters():
                parameter.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return the features of all blocks, (B, D) float32."""
        return self._features(images)

    def chain(self) -> Chain:
        """Return this module as a chain of two blocks, features and head, without the body's unused head."""
        body = self._body_chain
        stop = len(body.blocks) - 1
        features = Block(
            "features",
            (self._features,),
            tuple(body.modules(0, stop)),
            tuple(f"body.{name}" for name, _ in body.named_parameters(0, stop)),
            tuple(f"body.{name}" for name, _ in body.named_buffers(0, stop)),
        )
        parameters = tuple(f"head.{name}" for name, _ in self.head.named_parameters())
        buffers = tuple(f"head.{name}" for name, _ in self.head.named_buffers())
        return Chain(self, (features, Block("head", (self.head,), (self.head,), parameters, buffers)))

    def make_room(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Allocate the centres of a `KernelHead` for `state`, a state_dict of such a classifier; return the state.

        A kernel head for classes of version 0.1.0 had no bias: it gets one of zeros.
        """
        centres = state.get("head.centres")
        if not isinstance(self.head, KernelHead) or centres is None or centres.dim() != 2:
            return state
        self.head.hold(len(centres))
        return {"head.bias": torch.zeros(self.head.out_features), **state}

    @torch.no_grad()
    def _width(self, example: Tensor) -> int:
        with in_evaluation(self.body):
            return self.features(example).shape[1]


def solvable_chain(
    chain: Chain,
    settings: HeadConfig,
    *,
    classes: int,
    example: Tensor,
    reads_mirrored: bool = False,
) -> Chain:
    """Return the chain of two blocks, features and head, whose head is to be fitted.

    The model is unchanged and becomes part of the result; `example`, (B, C, H, W), gives the shape alone. For
    `reads_mirrored` see `MultiLevelClassifier`.

    Raises:
        UsageError: the model has no such head.
    """
    if settings.head == "multi-level":
        return MultiLevelClassifier(
            chain,
            classes=classes,
            pool=settings.pool,
            example=example,
            kernel=settings.head_fit == "kernel",
            reads_mirrored=reads_mirrored,
            tokens=settings.token_form,
        ).chain()
    steps, layer = before_last_layer(chain)
    path = next(name for name, module in chain.model.named_modules() if module is layer)
    own = (f"{path}.weight", f"{path}.bias")
    features = Block(
        "features",
        (*(step for block in chain.blocks[:-1] for step in block.steps), *steps),
        tuple(module for module in chain.modules() if module is not layer),
        tuple(name for name, _ in chain.named_parameters() if name not in own),
        tuple(name for name, _ in chain.named_buffers()),
    )
    return Chain(chain.model, (features, Block("head", (layer,), (layer,), own, ())))


def head_of(chain: Chain) -> SolvableHead:
    """Return the head layer of a `solvable_chain`."""
    (layer,) = chain.blocks[-1].steps
    assert isinstance(layer, (nn.Linear, KernelHead)), "no chain of solvable_chain"
    return layer


@torch.no_grad()
def take(layer: SolvableHead, fit: HeadFit | KernelFit) -> None:
    """Copy a fit into the head layer; the centres of a kernel head are shared with `fit.centres`."""
    if isinstance(fit, KernelFit):
        assert isinstance(layer, KernelHead)
        # Not copied: for many rows a copy would take much of a rank's memory.
        layer.centres, layer.weight.data = fit.centres, fit.weight
        layer.projection.copy_(fit.projection)
        layer.shift.copy_(fit.shift)
        layer.bias.copy_(fit.bias)
        return
    for name, tensor in layer.state_dict().items():
        tensor.copy_(getattr(fit, name))
