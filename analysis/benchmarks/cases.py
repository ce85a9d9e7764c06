"""The cases: which module measures which rows, and for how long at most. Nothing is imported here to know that."""

from __future__ import annotations

from dataclasses import dataclass

CUTS = range(1, 6)


@dataclass(frozen=True)
class Case:
    """A module of rows/, the rows that it measures, and seconds for each of them.

    The module has `measure(ranks, wanted, pace, scratch)`, which yields rows and which every rank calls.
    """

    module: str
    rows: tuple[str, ...]
    seconds: float
    setup_seconds: float = 10.0
    """For start-up and what precedes the first step, in all."""

    def planned_seconds(self, wanted: tuple[str, ...] | None = None) -> float:
        """Return what the rows out of `wanted` may take, all by default."""
        rows = self.rows if wanted is None else self.chosen(wanted)
        return len(rows) * self.seconds + self.setup_seconds if rows else 0.0

    def chosen(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return this case's rows out of `wanted`."""
        return tuple(row for row in self.rows if row in wanted)


CASES = (
    Case(
        "loops",
        (
            "step_vs_distributed_optimizer",
            "step_vs_ddp_gloo",
            "observing_gradients",
            "step_vs_optimizer_per_block",
        ),
        28,
    ),
    Case("loops", ("frozen_step_vs_pruned_optimizer", "frozen_step_vs_optimizer_per_block"), 18),
    Case("frozen", tuple(f"frozen_step_cut{cut}" for cut in CUTS), 14),
    Case("inputs", ("data_and_logging",), 14),
    Case("exchange", ("allreduce_bytes",), 10),
    Case("exchange", ("compression_fp16", "compression_powersgd4", "compression_powersgd16"), 30),
    Case("exchange", ("compression_powersgd4_64px",), 60),
    Case(
        "cached",
        (*(f"cached_step_cut{cut}" for cut in CUTS), "cached_step_224px_cut2", "cached_step_224px_cut4"),
        14,
        40,
    ),
    Case("filling", ("filling_epoch_cut1", "filling_epoch_cut5"), 35, 20),
    Case("reading", ("shuffled_read_2k", "shuffled_read_64k"), 6),
    Case("verification", ("verification",), 10),
    Case("checks", ("checks_of_an_epoch", "index_of_256_files"), 12),
    Case("votes", ("vote_every_4_steps",), 20),
    Case("whole_runs", tuple(f"whole_run_cut{cut}" for cut in CUTS), 26, 15),
    Case(
        "automatic",
        (
            "cache_auto_cut4",
            "cache_predicted_saving",
            "cache_auto_slow_disk_cut1",
            "cache_auto_slow_disk_cut5",
            "cache_auto_tiny_budget",
            "cache_auto_last_epoch",
            "cache_auto_moving_cut",
        ),
        26,
        15,
    ),
)

ROWS = tuple(row for case in CASES for row in case.rows)
TOTAL_SECONDS = 860.0
"""All cases together, so that the whole bench stays within 15 minutes."""
