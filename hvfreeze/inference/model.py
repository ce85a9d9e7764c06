"""A finished run's model, ready to be applied.

applied = hvfreeze.load_model("runs/20260101-120000-resnet18-digits")
batch = torch.stack([applied.transform(Image.open(path)) for path in paths])
names = [applied.classes[row] for row in applied.logits(batch).argmax(1)]
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.heads.multilevel import MultiLevelClassifier
from hvfreeze.inference.card import Card, Preparation, TextPreparation, read_card, sha256_of
from hvfreeze.model.early_exits import EarlyExits, add_exits
from hvfreeze.model.model_sources import build_model, set_memory_formats
from hvfreeze.model.modes import in_precision
from hvfreeze.model.weights import read_weights
from hvfreeze.runs.directory import resuming
from hvfreeze.runs.reading import read_object
from hvfreeze.user_code import code_sha256, is_named_code


@dataclass(frozen=True, eq=False)
class Applied:
    """A model in evaluation mode, and how images, or a text, come to it."""

    model: nn.Module
    """From (N, 3, S, S) float32 to (N, classes) logits; a module like any other, with its gradients on."""
    transform: Preparation | TextPreparation
    """From a PIL image or a uint8 tensor to (3, S, S) float32: the pixels that the run was evaluated on. For a text's
    model from a text to codes."""
    classes: tuple[str, ...]
    """In the order of the logits; characters of a text's model, names of labels or numbers of others."""
    card: Card
    exits: EarlyExits | None = None
    """Of a model that was trained with local critics: `exits(images)` gives each one's (N, classes) logits."""

    @property
    def preparation(self) -> Preparation:
        """How images are prepared. Raises UsageError where the model reads text."""
        if not isinstance(self.transform, Preparation):
            raise UsageError(f"the model ({self.card.model}) reads text, no images; hvfreeze predict continues a text")
        return self.transform

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return (N, classes) float32 for (N, 3, S, S) float32, as in the run's evaluation: its precision too.

        A text's model returns (N, characters, T) for (N, T) int64 codes: of the characters that follow.
        """
        given = images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images
        with in_precision(self.card.precision):
            found: Tensor = self.model(given)
        return found.float()


def load_model(run_dir: str | os.PathLike[str], *, name: str = "model", trust_code: bool = False) -> Applied:
    """Return the model of a finished run; random state is untouched, and no code is run that the files bring or name.

    Args:
        run_dir: the run directory, or a copy of its model.pt and model.yaml.
        name: which of several models, as in `model-head0`.
        trust_code: run the function that makes the model where the card names one of the user's own.

    Raises:
        RefusedError: it holds no finished model, a file is missing or damaged, or they do not fit each other.
    """
    root = Path(run_dir)
    weights, about = root / f"{name}.pt", root / f"{name}.yaml"
    check_finished(root, weights, about)
    card = read_card(about)
    check_trusted(card, about, trust_code=trust_code)
    found = sha256_of(weights)
    if found != card.sha256:
        raise RefusedError(
            f"{weights} is not the file that {about.name} tells of: its SHA-256 is {found[:12]}..., not "
            f"{card.sha256[:12]}...; {way_on(root) if is_unfinished(root) else 'put both files of one run back'}"
        )
    state = read_weights(str(weights))
    model, exits = build(card, about)
    if isinstance(model, MultiLevelClassifier):
        model.make_room(state)
    own = model.state_dict()
    odd = [name for name in {**own, **state} if name not in own or name not in state]
    odd += [name for name in own if name in state and own[name].shape != state[name].shape]
    if odd:
        raise RefusedError(
            f"{about} does not fit {weights.name}: {odd[0]} is not as in a {card.model} with {len(card.classes)} "
            "classes; put both files of one run back"
        )
    model.load_state_dict(state)
    return Applied(model.eval(), card.preparation, card.classes, card, exits)


def check_trusted(card: Card, about: Path, *, trust_code: bool) -> None:
    """Refuse a model that code of the user's own makes, unless that is trusted; warn where its file has changed."""
    if not is_named_code(card.model):
        return
    if not trust_code:
        raise RefusedError(
            f"{about}: the model is made by {card.model}, which is code of its own; where you trust it, pass "
            "--trust-code, or trust_code=True"
        )
    try:
        now = code_sha256("model", card.model)
    except UsageError as error:
        raise RefusedError(f"{about} cannot be followed: {error}") from error
    if now != card.code_sha256:
        warnings.warn(f"the file of {card.model} is not the one that the model was trained with", stacklevel=2)


def check_finished(root: Path, weights: Path, about: Path) -> None:
    """Refuse a directory without a model and its card, and tell what to do about it."""
    if not root.is_dir():
        raise RefusedError(f"run directory {root} does not exist")
    config = root / "config.yaml"
    if not weights.exists() and (others := sorted(path.stem for path in root.glob("model*.pt"))):
        raise RefusedError(
            f"{root} holds no {weights.name}; name one that it holds, {' or '.join(others)}: "
            f"--model-name {others[0]}, or hvfreeze.load_model(run, name={others[0]!r})"
        )
    if not weights.exists():
        way = way_on(root) if config.exists() else "name the directory of a run that has ended"
        raise RefusedError(f"{root} holds no finished model: there is no {weights.name}; {way}")
    if not about.exists():
        copy = f"copy it together with {weights.name} from where the run was made"
        raise RefusedError(f"{about} is missing; {way_on(root) if is_unfinished(root) else copy}")


def is_unfinished(root: Path) -> bool:
    """Tell whether a run has not ended, as one that was killed while it wrote its model."""
    return (root / "config.yaml").exists() and not (root / "summary.json").exists()


def way_on(root: Path) -> str:
    """Return how to continue the run in a directory, on as many ranks as it has."""
    ranks = None
    with suppress(RefusedError):
        ranks = read_object(root / "environment.json", ()).get("size")
    return f"go on with: {resuming(root, ranks=ranks if type(ranks) is int else 1)}"


def build(card: Card, path: Path) -> tuple[nn.Module, EarlyExits | None]:
    """Return the card's architecture, head and exits, in the memory formats of training, with random weights."""
    try:
        with torch.random.fork_rng(devices=[]):
            shape, classes, pool = card.preparation.shape, len(card.classes), card.pool
            head = "last" if pool is not None else card.head
            side = max(shape[1:] or shape)
            built = build_model(
                card.model, num_classes=classes, image_size=side, head=head, architecture=card.architecture
            )
            built = set_memory_formats(built, shape)
            model = built.model
            if pool is None and not card.exits:
                return model, None
            example = torch.zeros(2, *shape)
            chain = built.in_blocks(scheme=card.blocks, example=example)
            if pool is None:
                return model, add_exits(chain, card.exits, example=example, classes=classes)
            kernel = card.head.startswith("kernel:")
            classifier = MultiLevelClassifier(
                chain,
                classes=classes,
                pool=pool,
                example=example,
                kernel=kernel,
                reads_mirrored=card.reads_mirrored,
                biased=card.answers.is_biased,
                tokens=card.tokens,
            )
            return classifier, None
    except UsageError as error:
        raise RefusedError(f"{path} cannot be followed: {error}") from error
