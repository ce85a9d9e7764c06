"""How the chain of blocks is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvfreeze.config.rules import number_list, one_of, rule, setting

STRATEGIES = ("replicas", "shared-trunk", "grid")
OWN_FLAGS = {
    "replicas": (),
    "shared-trunk": ("heads", "tasks", "head_blocks", "labels", "trunk", "cut_by", "cut_at"),
    "grid": ("parts", "replicas", "micro_batches", "pipeline", "redeal", "cut_by", "cut_at"),
}
"""The flags that only some strategies know. Their defaults are None, so that one is seen to be given."""


MOST_PARTS = 4096


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Which rank runs which blocks, and what ranks exchange."""

    strategy: str = setting(
        "replicas",
        "NAME",
        "replicas (every rank has the whole model and a shard of the data), shared-trunk (several models on one "
        "frozen trunk that lies on all ranks) or grid (one model cut over ranks, in several replicas)",
    )
    heads: int | None = setting(
        None, "N", "shared-trunk: models, each with a head on the data's own labels; default: one per rank"
    )
    tasks: str | None = setting(
        None, "FILE", "shared-trunk: one model a task instead; a CSV of labels, or YAML that says more"
    )
    head_blocks: int | None = setting(
        None, "K", "shared-trunk: the last K blocks are each model's own; default: 1, a linear head"
    )
    labels: str | None = setting(
        None,
        "HOW",
        "shared-trunk: ride (with the activations), direct (from rank 0) or replay (each rank's own); [replay]",
    )
    trunk: str | None = setting(
        None, "HOW", "shared-trunk: split (over the ranks), or whole (each rank runs all of it: the baseline); [split]"
    )
    cut_by: str | None = setting(
        None,
        "HOW",
        "shared-trunk, grid: what segments share evenly: compute, params, count, or given with --cut-at; [compute]",
    )
    cut_at: str | None = setting(None, "LIST", "with --cut-by given: the blocks at which segments begin, as in 2,4")

    parts: int | None = setting(
        None,
        "P",
        "grid: ranks over which the model is cut; default: all ranks, or those that --replicas leaves to each",
    )
    replicas: int | None = setting(None, "R", "grid: copies of the model, each on --parts ranks; default: 1")
    micro_batches: int | None = setting(
        None, "M", "grid: parts of a batch that follow each other through the model; default: 2 a part, 1 with one part"
    )
    pipeline: str | None = setting(
        None, "HOW", "grid: fill-drain (all forwards first) or 1f1b (fewest activations kept), the same bits; [1f1b]"
    )
    redeal: str | None = setting(
        None,
        "HOW",
        "grid: on (ranks whose blocks are all frozen, or cached, become further lines of the rest) or off (they wait); "
        "[off]",
    )

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        for flag in {flag for flags in OWN_FLAGS.values() for flag in flags}:
            self._belongs(flag, getattr(self, flag))
        rule(self.heads is None or 1 <= self.heads <= 4096, "heads", self.heads, "in 1..4096")
        rule(
            self.heads is None or self.tasks is None,
            "heads",
            self.heads,
            "left out with --tasks, which names the models",
        )
        blocks = self.head_blocks
        rule(blocks is None or blocks >= 1, "head-blocks", blocks, "at least 1")
        for flag, choices in (
            ("labels", ("ride", "direct", "replay")),
            ("trunk", ("split", "whole")),
            ("cut_by", ("compute", "params", "count", "given")),
            ("pipeline", ("fill-drain", "1f1b")),
            ("redeal", ("on", "off")),
        ):
            if getattr(self, flag) is not None:
                one_of(flag.replace("_", "-"), getattr(self, flag), choices)
        for flag in ("parts", "replicas", "micro_batches"):
            value = getattr(self, flag)
            rule(value is None or 1 <= value <= MOST_PARTS, flag.replace("_", "-"), value, f"in 1..{MOST_PARTS}")
        given = self.cut_by == "given"
        rule(
            given == (self.cut_at is not None),
            "cut-at",
            self.cut_at,
            "given together with --cut-by given, and only then",
        )
        self.starts()

    def starts(self) -> list[int]:
        """Return the blocks at which segments begin, but for the first."""
        if self.cut_at is None:
            return []
        starts = number_list("cut-at", self.cut_at)
        rule(all(start == start // 1 for start in starts), "cut-at", self.cut_at, "whole numbers separated by commas")
        return [int(start) for start in starts]

    def grid_parts(self, ranks: int) -> int:
        """Return over how many of `ranks` ranks --strategy grid cuts the model.

        Raises:
            UsageError: --parts and --replicas do not make up the number of ranks.
        """
        parts = self.parts or max(1, ranks // (self.replicas or 1))
        replicas = self.replicas or max(1, ranks // parts)
        rule(
            parts * replicas == ranks,
            "parts",
            parts,
            f"such that --parts x --replicas ({parts} x {replicas}) is the number of ranks ({ranks})",
            f"start {parts * replicas} ranks, or leave one of the two out",
        )
        return parts

    @property
    def redeals(self) -> bool:
        """Whether the ranks of a grid are dealt out anew when its front freezes."""
        return self.redeal == "on"

    def _belongs(self, flag: str, value: Any) -> None:
        owners = [name for name, flags in OWN_FLAGS.items() if flag in flags]
        wanted = f"used with --strategy {' or '.join(owners)} only"
        rule(value is None or self.strategy in owners, flag.replace("_", "-"), value, wanted)
