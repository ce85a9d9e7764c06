"""Find and check the files of a finished run's model. Imports no torchvision, so that `predict` can decode early."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.inference.card import Card, read_card
from hvfreeze.runs.directory import resuming
from hvfreeze.runs.reading import read_object
from hvfreeze.user_code import code_sha256, is_named_code


@dataclass(frozen=True)
class ModelFiles:
    """The two files of a model, and the content of the second."""

    weights: Path
    about: Path
    card: Card


def find_model(run_dir: str | os.PathLike[str], *, name: str = "model", trust_code: bool = False) -> ModelFiles:
    """Return the files of a finished run's model; see `model.load_model`.

    Raises:
        RefusedError: there is no finished model, a file is missing, the card is damaged, or its code is not trusted.
    """
    root = Path(run_dir)
    weights, about = root / f"{name}.pt", root / f"{name}.yaml"
    check_finished(root, weights, about)
    card = read_card(about)
    check_trusted(card, about, trust_code=trust_code)
    return ModelFiles(weights, about, card)


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
