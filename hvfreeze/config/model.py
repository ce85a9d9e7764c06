"""The settings of the model, and the parsers of their values. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from hvfreeze.config.head import TRAINED, parse_mlp
from hvfreeze.config.section import Alternative, Section, setting
from hvfreeze.rules import Must, reads, rule
from hvfreeze.user_code import HF, TIMM, check_named_code, is_named_code

TINY_LM = "tiny-lm"
"""The model for a text."""


def is_url(text: str) -> bool:
    """Return True if a text is a URL."""
    return re.match(r"(https?|file)://", text) is not None


def weights_entry(text: str) -> tuple[str, str] | None:
    """Return the enumeration, perhaps empty, and the name in ResNet18_Weights.IMAGENET1K_V1, DEFAULT and the like.

    None for a text of another form: the path of a file, or a URL.
    """
    found = re.fullmatch(r"(?:(\w+_Weights)\.)?(DEFAULT|IMAGENET1K_\w+)", text)
    return (found[1] or "", found[2]) if found else None


def is_downloaded(weights: str) -> bool:
    """Return True if --weights is downloaded, and is not a file."""
    return is_url(weights) or weights_entry(weights) is not None


def check_model(text: str) -> None:
    """Raise UsageError where `text` cannot be the name of a model."""
    rule(bool(text), "model", repr(text), "the name of a classification model")
    parse_mlp("model", text)
    if is_named_code(text):
        check_named_code("model", text)


Blocks = Annotated[str, Must(bool, "auto, stage, residual, paper or NAME,NAME,...")]
PRETRAINED = Alternative("--weights", lambda config: config.model.weights != "none")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The network, its blocks, and its initial weights."""

    model: Annotated[str, reads(check_model)] = setting(
        "resnet18",
        "NAME",
        "a torchvision classifier, resnet20, resnet110, mlp or mlp-WxW... (hidden layers of W neurons), tiny-lm for "
        "--data text, timm:NAME, hf:FOLDER or hf:ORGANISATION/NAME (transformers), or package:function (custom)",
        brief="torchvision's, timm:NAME, hf:FOLDER",
    )
    blocks: Blocks = setting(
        "auto",
        "HOW",
        "how the model is split into blocks: stage, residual, paper or NAME,NAME,...; auto: residual for strategies "
        "that distribute blocks, else stage",
    )
    weights: str = setting(
        "none",
        "FILE",
        "none, DEFAULT or another of torchvision's names such as IMAGENET1K_V2 (downloaded), a URL, or a file with a "
        "state_dict, also as safetensors; default: none; with --model hf:... DEFAULT, those of its folder",
        brief="DEFAULT (downloaded), a URL or a file",
    )
    reset_head: bool = setting(
        False,
        "",
        "initialise the head at random, even if the weights have one for the same number of classes",
        of=(PRETRAINED, TRAINED),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = not is_named_code(self.model) or weights_entry(self.weights) is None
        rule(own, "weights", self.weights, "none or a file with a custom model")
        whole = not self.model.startswith((TIMM, HF)) or weights_entry(self.weights) in (None, ("", "DEFAULT"))
        rule(whole, "weights", self.weights, "none, DEFAULT or a file with a model of timm's or Hugging Face's")
