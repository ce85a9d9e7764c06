"""Names of weights: torchvision's entries, such as DEFAULT and IMAGENET1K_V2, and URLs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from hvfreeze.config.model import is_url, weights_entry
from hvfreeze.errors import RefusedError, UsageError
from hvfreeze.torchvision_shim import torchvision
from hvfreeze.user_code import HF, TIMM


def find_entry(model: str, weights: str) -> Any:
    """Return torchvision's entry for the name or URL `weights`; None for files and other URLs.

    Also None for a model that is not torchvision's, such as timm:NAME.

    Raises:
        UsageError: torchvision has no entry of this name for the model.
    """
    named = weights_entry(weights)
    if ":" in model or (named is None and not is_url(weights)):
        return None
    try:
        entries = {entry.name: entry for entry in torchvision.models.get_model_weights(model)}
    except ValueError:
        entries = {}
    if named is None:
        return next((entry for entry in entries.values() if entry.url == weights), None)
    kind, name = named
    if not entries:
        raise UsageError(f"weights ({weights}): torchvision has none for {model}; give a file, or use --weights none")
    # DEFAULT is an alias of one of them.
    found = getattr(torchvision.models.get_model_weights(model), name, None)
    own = next(iter(entries.values())).__class__.__name__
    if found is None or kind not in ("", own):
        raise UsageError(f"weights ({weights}) are not among those of {model}, which has {own}.{' and '.join(entries)}")
    return found


def has_published(model: str) -> bool:
    """Return True if a model may have published weights, so that --weights DEFAULT downloads them."""
    if ":" in model:
        return model.startswith((TIMM, HF))
    try:
        return len(torchvision.models.get_model_weights(model)) > 0
    except ValueError:
        return False


def entry_of_file(model: str, path: Path) -> Any:
    """Return torchvision's entry of a model by the name of its file; None for other file names."""
    try:
        entries = () if ":" in model else torchvision.models.get_model_weights(model)
    except ValueError:
        return None
    return next((entry for entry in entries if _file_name(entry.url) == path.name), None)


def place_of(url: str, *, hashed: bool = False) -> Path:
    """Return the download path of a URL; names of torchvision's files are `hashed`, others get a hash of the URL."""
    name = _file_name(url)
    if not hashed:
        name = f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}"
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def download(url: str) -> Path:
    """Download a URL once and return its path. Raises RefusedError if that fails."""
    path = place_of(url)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=False)
    except Exception as error:  # the network, the disk and the server fail in as many ways
        raise RefusedError(
            f"weights ({url}) cannot be downloaded: {error}; download the file and give its path"
        ) from error
    return path


def _file_name(url: str) -> str:
    return Path(unquote(urlsplit(url).path)).name
