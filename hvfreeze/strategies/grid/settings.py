"""The settings of a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from hvfreeze.config.freeze import VOTE_WEIGHTS
from hvfreeze.config.section import setting
from hvfreeze.config.strategy import Accepted, CutConfig, Parts, Refusal
from hvfreeze.rules import choice, rule
from hvfreeze.wording import plural


@dataclass(frozen=True, kw_only=True)
class GridConfig(CutConfig):
    """One model cut over ranks, in several replicas."""

    strategy: str = "grid"
    parts: Parts | None = setting(
        None, "P", "ranks that share one copy of the model; default: all ranks, divided by --replicas"
    )
    replicas: Parts | None = setting(
        None, "R", "copies of the model, each on --parts ranks; default: 1, or all ranks, divided by --parts"
    )
    micro_batches: Parts | None = setting(
        None, "M", "micro-batches that a batch is split into; default: 2 per part, 1 with one part"
    )
    pipeline: Annotated[str, choice("fill-drain", "1f1b")] = setting(
        "1f1b", "HOW", "fill-drain (all forward passes first) or 1f1b (least memory); equal results"
    )
    redeal: Annotated[str, choice("on", "off")] = setting(
        "off",
        "HOW",
        "on (ranks whose blocks are frozen or cached train the remaining blocks) or off (they wait)",
    )

    builder = "hvfreeze.strategies.grid.build:open_grid"
    page = "grid"
    blocks = "residual"
    accepts: ClassVar[Mapping[str, Accepted]] = {
        "mixup": ((0.0,), "no rank has both the images and the labels of a batch"),
        "compression": (("none", "fp16"), "choose fp16 or none"),
        "optimizer": (("sgd", "adamw"), "choose sgd or adamw"),
    }

    @property
    def redeals(self) -> bool:
        """Whether ranks are repartitioned when front blocks freeze."""
        return self.redeal == "on"

    def ranks_per_replica(self, ranks: int) -> int:
        """Return the number of ranks, of `ranks`, that share one copy of the model.

        Raises:
            UsageError: --parts times --replicas is not the number of ranks.
        """
        parts = self.parts or max(1, ranks // (self.replicas or 1))
        replicas = self.replicas or max(1, ranks // parts)
        rule(
            parts * replicas == ranks,
            "parts",
            parts,
            f"such that --parts x --replicas ({parts} x {replicas}) is the number of ranks ({ranks})",
            f"start {plural(parts * replicas, 'rank')}, or leave one of the two flags out",
        )
        return parts

    def reads_images(self, place: int) -> bool:
        """Return True if a rank is, or may become, the first of a pipeline."""
        return place == 0 or self.redeals

    def refusals(self, config: Any) -> list[Refusal]:
        """Return the voting weights that do not go with ranks that are repartitioned."""
        weight = config.freeze.vote_weight
        fits = weight in VOTE_WEIGHTS or not self.redeals
        return [("vote_weight", weight, fits, "with --redeal on the set of voting ranks changes")]

    def unread(self, leaf: str, *, ranks: int, freezes: bool) -> str | None:
        """Return why settings of the pipeline have no effect if the model is not cut."""
        if ranks == 1 and leaf != "micro_batches":
            return "there is only one rank"
        whole = self.ranks_per_replica(ranks) == 1
        if whole and leaf in ("cut_by", "cut_at", "pipeline", "redeal"):
            return "--parts is 1"
        return "no block is frozen" if leaf == "redeal" and self.redeals and not freezes else None
