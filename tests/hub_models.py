"""Small models of the transformers library in folders, as its users have them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
DINO = {**TRANSFORMER, "mlp_ratio": 2, "image_size": 56, "patch_size": 8}
VIT = {**TRANSFORMER, "intermediate_size": 32, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1}
STAGES = {"hidden_sizes": [8, 12, 16, 20], "depths": [2, 1, 2, 1]}
KINDS: dict[str, dict[str, Any]] = {
    "convnext": {**STAGES, "patch_size": 2, "drop_path_rate": 0.2},
    "convnextv2": {**STAGES, "patch_size": 2},
    "deit": VIT,
    "dinov2": {**DINO, "drop_path_rate": 0.2},
    "dinov2_with_registers": DINO,
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 12, 16], "depths": [2, 1, 1], "layer_type": "basic"},
    "swin": {"embed_dim": 8, "depths": [2, 2, 1], "num_heads": [1, 2, 2], "window_size": 4, "patch_size": 2},
    "vit": VIT,
}


def save_small(kind: str, folder: Path, *, classes: int = 7, **changes: Any) -> Any:
    """Writes a model with random weights as `save_pretrained` does; returns it, in evaluation mode."""
    library = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    known = importlib.import_module("hvfreeze.model.hugging_face").FAMILIES
    settings = {"architectures": [known[kind].class_name], "num_labels": classes, "image_size": 32, **KINDS[kind]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = library.AutoConfig.for_model(kind, **{**settings, **changes})
        model = library.AutoModelForImageClassification.from_config(config)
    model.save_pretrained(folder)
    return model.eval()
