"""Load a finished run's model.

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
    """A model in evaluation mode with its preprocessing."""

    model: nn.Module
    """Module from (N, 3, S, S) float32 to (N, classes) logits, with gradients enabled."""
    transform: Preparation | TextPreparation
    """Preprocessing of the run's evaluation: from a PIL image or a uint8 tensor to (3, S, S) float32; for a language
    model from a text to codes."""
    classes: tuple[str, ...]
    """Names in the order of the logits: classes, labels or numbers, or the characters of a language model."""
    card: Card
    exits: EarlyExits | None = None
    """Exits of a model trained with local critics: `exits(images)` returns the (N, classes) logits of each; else None.
    """

    @property
    def preparation(self) -> Preparation:
        """Preprocessing of images. Raises UsageError for a language model."""
        if not isinstance(self.transform, Preparation):
            raise UsageError(f"the model ({self.card.model}) reads text, not images; hvfreeze predict continues a text")
        return self.transform

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return (N, classes) float32 for (N, 3, S, S) float32, in the precision of the run's evaluation.

        A language model returns (N, characters, T) for (N, T) int64 codes: logits of the next characters.
        """
        given = images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images
        with in_precision(self.card.precision):
            found: Tensor = self.model(given)
        return found.float()


def load_model(run_dir: str | os.PathLike[str], *, name: str = "model", trust_code: bool = False) -> Applied:
    """Load the model of a finished run. Random state is unchanged, and no code from the files runs by default.

    Args:
        run_dir: the run directory, or a folder with copies of its model.pt and model.yaml.
        name: name of one of several models, as in `model-head0`.
        trust_code: whether to run the user's function that builds a custom model.

    Raises:
        RefusedError: there is no finished model, a file is missing or damaged, or the files do not match.
    """
    root = Path(run_dir)
    weights, about = root / f"{name}.pt", root / f"{name}.yaml"
    check_finished(root, weights, about)
    card = read_card(about)
    check_trusted(card, about, trust_code=trust_code)
    found = sha256_of(weights)
    if found != card.sha256:
        raise RefusedError(
            f"{weights} does not match {about.name}: its SHA-256 is {found[:12]}..., not "
            f"{card.sha256[:12]}...; {resume_advice(root) if is_unfinished(root) else 'restore both files of one run'}"
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
            f"{about} does not fit {weights.name}: {odd[0]} differs from a {card.model} with "
            f"{len(card.classes)} classes; restore both files of one run"
        )
    model.load_state_dict(state)
    return Applied(model.eval(), card.preparation, card.classes, card, exits)


def check_trusted(card: Card, about: Path, *, trust_code: bool) -> None:
    """Refuse a custom model unless its code is trusted; warn if its file has changed."""
    if not is_named_code(card.model):
        return
    if not trust_code:
        raise RefusedError(
            f"{about}: the model comes from the function {card.model}; if you trust its code, use "
            f"--trust-code or trust_code=True"
        )
    try:
        now = code_sha256("model", card.model)
    except UsageError as error:
        raise RefusedError(f"{about} cannot be applied: {error}") from error
    if now != card.code_sha256:
        warnings.warn(f"the file of {card.model} has changed since the training", stacklevel=2)


def check_finished(root: Path, weights: Path, about: Path) -> None:
    """Refuse a directory without a model and its card, with the way out."""
    if not root.is_dir():
        raise RefusedError(f"run directory {root} does not exist; name the directory of a finished run")
    config = root / "config.yaml"
    if not weights.exists() and (others := sorted(path.stem for path in root.glob("model*.pt"))):
        raise RefusedError(
            f"{root} holds no {weights.name}, but {' and '.join(others)}; choose one with --model-name "
            f"{others[0]}, or hvfreeze.load_model(run, name={others[0]!r})"
        )
    if not weights.exists():
        way = resume_advice(root) if config.exists() else "name the directory of a finished run"
        raise RefusedError(f"{root} holds no finished model ({weights.name} is missing); {way}")
    if not about.exists():
        copy = f"copy it with {weights.name} from the run directory"
        raise RefusedError(f"{about} is missing; {resume_advice(root) if is_unfinished(root) else copy}")


def is_unfinished(root: Path) -> bool:
    """Return True if a run has not ended, for example killed while writing its model."""
    return (root / "config.yaml").exists() and not (root / "summary.json").exists()


def resume_advice(root: Path) -> str:
    """Return the command that continues the run in a directory, on the same number of ranks."""
    ranks = None
    with suppress(RefusedError):
        ranks = read_object(root / "environment.json", ()).get("size")
    return f"continue the run with: {resuming(root, ranks=ranks if type(ranks) is int else 1)}"


def build(card: Card, path: Path) -> tuple[nn.Module, EarlyExits | None]:
    """Build the card's architecture, head and exits with random weights, in the memory formats of training."""
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
        raise RefusedError(f"{path} cannot be applied: {error}") from error
