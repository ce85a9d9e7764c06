"""The network, and what classifies on its features."""

from __future__ import annotations

from dataclasses import dataclass

from hvfreeze.config.rules import one_of, rule, setting
from hvfreeze.named_code import check_named_code, is_named_code

MOST_CELLS = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network, where it may be cut, and what it starts from."""

    model: str = setting(
        "resnet18",
        "NAME",
        "a torchvision classifier, resnet20, resnet110, timm:NAME, or package:function for your own",
    )
    blocks: str = setting(
        "auto",
        "HOW",
        "where it may be cut: stage, residual, paper or NAME,NAME,...; auto: residual for --strategy grid, else stage",
    )
    weights: str = setting("none", "FILE", "none, DEFAULT (torchvision's, downloaded), or a state_dict's file")
    reset_head: bool = setting(False, "", "start the head afresh, also where the weights have one of as many classes")

    def __post_init__(self) -> None:
        rule(bool(self.model), "model", repr(self.model), "the name of a classification model")
        if is_named_code(self.model):
            check_named_code("model", self.model)
            rule(self.weights != "DEFAULT", "weights", "DEFAULT", "none or a file with a model of your own")
        rule(bool(self.blocks), "blocks", repr(self.blocks), "auto, stage, residual, paper or NAME,NAME,...")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The head: what it reads, and whether it is trained with the rest or solved on frozen blocks."""

    head: str = setting(
        "last", "WHICH", "last (reads the last block) or multi-level (reads every block)", auto="multi-level"
    )
    head_fit: str = setting(
        "sgd",
        "HOW",
        "sgd (trained with the rest), or, all blocks frozen, solved by all ranks: exact (logistic regression), kernel "
        "(likeness to every training sample)",
        auto="kernel",
    )
    pool: int = setting(4, "P", "with --head multi-level: each block's map is averaged to at most P x P cells")
    mirror: str = setting(
        "on", "WHETHER", "on: a solved head is fitted to every sample and its mirror image; off: half the time"
    )

    def __post_init__(self) -> None:
        one_of("mirror", self.mirror, ("on", "off"))
        one_of("head", self.head, ("last", "multi-level"))
        one_of("head-fit", self.head_fit, ("sgd", "exact", "kernel"))
        rule(self.solved or self.mirrors, "mirror", self.mirror, "left out with --head-fit sgd")
        rule(1 <= self.pool <= MOST_CELLS, "pool", self.pool, f"in 1..{MOST_CELLS}")
        # Features of several blocks differ a hundredfold in size: no learning rate fits them all.
        fits = self.head == "last" or self.solved
        rule(fits, "head", self.head, "last with --head-fit sgd", "pass --head-fit exact or kernel too")

    @property
    def solved(self) -> bool:
        """Whether the head is solved, not trained."""
        return self.head_fit != "sgd"

    @property
    def mirrors(self) -> bool:
        """Whether a solved head is fitted to mirror images too, where they show the same."""
        return self.mirror == "on"
