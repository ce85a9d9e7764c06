"""The card of a run, from its settings and its data."""

from __future__ import annotations

from hvfreeze import __version__
from hvfreeze.config.head import HeadConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus
from hvfreeze.data.reading import Reading, reading_of
from hvfreeze.data.views import Transform
from hvfreeze.data.windows import Shift
from hvfreeze.inference.card import MIRRORED, Card, Preparation, sha256_of
from hvfreeze.model.hugging_face import read_architecture
from hvfreeze.model.weights import weights_path
from hvfreeze.runs.environment import version_of
from hvfreeze.user_code import HF, TIMM, code_sha256, is_named_code

LIBRARIES = ("torch", "torchvision", "pillow")


def head_named(settings: HeadConfig, *, reads_mirrored: bool = False) -> str:
    """Return the head of the settings, in the form of `HEADS`."""
    if settings.head != "multi-level":
        return settings.head
    kind = "kernel" if settings.head_fit == "kernel" else settings.head
    tokens = "" if settings.token_form == "mean" else f":{settings.token_form}"
    return f"{kind}:{settings.pool}{tokens}{MIRRORED if reads_mirrored else ''}"


def libraries_of(config: Config) -> tuple[str, ...]:
    """Return the packages that a model's predictions depend on, without hvfreeze."""
    own = {TIMM: ("timm",), HF: ("transformers",)}
    return LIBRARIES + own.get(config.model.model.partition(":")[0] + ":", ())


def card_of(config: Config, corpus: Corpus, transform: Transform | Shift, *, rows: int, hashed: bool) -> Card:
    """Return the card of an unfinished run, which evaluates in batches of `rows`.

    With `hashed`, the weight file is read for its digest.
    """
    model, data = config.model, config.data
    path = weights_path(model.model, model.weights) if hashed else None
    card = Card(
        model=model.model,
        architecture=read_architecture(model.model) if model.model.startswith(HF) else None,
        code_sha256=code_sha256("model", model.model) if is_named_code(model.model) else None,
        blocks=model.blocks,
        head=head_named(config.head),
        classes=corpus.train.classes,
        image=None
        if isinstance(transform, Shift)
        else preparation_of(transform, corpus.train.image_shape, reading_of(data)),
        context=data.context if isinstance(transform, Shift) else None,
        precision=config.optimizer.precision,
        batch_size=rows,
        data=data.data,
        weights=model.weights,
        weights_sha256=sha256_of(path) if path else None,
        accuracy_on="held-out" if data.validation_fraction > 0 else "test",
        versions={"hvfreeze": __version__, **{name: version_of(name) or "unknown" for name in libraries_of(config)}},
    )
    return card.of_task(corpus.task)


def preparation_of(transform: Transform, image_shape: tuple[int, ...], reading: Reading) -> Preparation:
    """Return the preprocessing for decoded images of (C, H, W), from `transform` without augmentation."""
    _, height, width = image_shape
    side, square = transform.image_size, (height,) if height == width else ()
    return Preparation(
        height=height,
        width=width,
        cropped_to=transform.cropped_to,
        enlarged_to=None if side in (transform.cropped_to, *square) else side,
        mean=transform.mean,
        std=transform.std,
        reading=reading.version,
        background=reading.background,
        fit=reading.fit,
        resample=reading.resample,
    )
