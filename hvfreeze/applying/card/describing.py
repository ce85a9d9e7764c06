"""The card of a run's model, as far as the run's settings and data tell it."""

from __future__ import annotations

from hvfreeze import __version__
from hvfreeze.applying.card.contents import Card, head_named
from hvfreeze.applying.card.file import sha256_of
from hvfreeze.applying.preparation import Preparation
from hvfreeze.chain.origins.weights import weights_path
from hvfreeze.config.model import HeadConfig, ModelConfig
from hvfreeze.config.sections import DataConfig
from hvfreeze.data.dealing import Corpus
from hvfreeze.data.views.transform import Transform
from hvfreeze.named_code import TIMM, code_sha256, is_named_code
from hvfreeze.runs.environment import version_of

LIBRARIES = ("torch", "torchvision", "pillow")


def describe(
    model: ModelConfig,
    head: HeadConfig,
    data: DataConfig,
    corpus: Corpus,
    transform: Transform,
    *,
    precision: str,
    batch_size: int,
    hashed: bool,
) -> Card:
    """Return the card of a run that has not ended; `hashed` tells whether to read the weights' file for its digest."""
    _, height, width = corpus.train.image_shape
    side, square = transform.image_size, (height,) if height == width else ()
    path = weights_path(model.model, model.weights) if hashed else None
    library = ("timm",) if model.model.startswith(TIMM) else ()
    return Card(
        model=model.model,
        code_sha256=code_sha256("model", model.model) if is_named_code(model.model) else None,
        blocks=model.blocks,
        head=head_named(head),
        classes=corpus.train.classes,
        image=Preparation(
            height=height,
            width=width,
            cropped_to=transform.cropped_to,
            enlarged_to=None if side in (transform.cropped_to, *square) else side,
            mean=transform.mean,
            std=transform.std,
        ),
        precision=precision,
        batch_size=batch_size,
        data=data.data,
        weights=model.weights,
        weights_sha256=sha256_of(path) if path else None,
        accuracy_on="held-out" if data.validation_fraction > 0 else "test",
        versions={"hvfreeze": __version__, **{name: version_of(name) or "unknown" for name in (*LIBRARIES, *library)}},
    )
