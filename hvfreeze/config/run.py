"""Where a run keeps its files, how it starts, what it says and which model it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from hvfreeze.config.rules import one_of, parse_cadence, parse_duration, rule, setting

MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run keeps its files, how it starts and what it starts from."""

    seed: int = setting(0, "SEED", "of the model's initialisation and dropout")
    threads: int | None = setting(
        None, "N", "torch threads per rank; default: OMP_NUM_THREADS, else this rank's share of the cores"
    )
    run_dir: str | None = setting(None, "DIR", "where the run's files go; default: runs/<time>-<name>")
    checkpoint_every: str = setting(
        "auto",
        "N",
        "epochs between checkpoints, or steps with the suffix s (200s); 0 is none; auto: at ends of epochs, as "
        "often as takes 3 % of the time",
    )
    evaluate_every: int = setting(
        1, "N", "epochs between evaluations; the last epoch and a solved head are always evaluated", auto=1000
    )
    keep: str = setting("last", "WHICH", "model to keep: last, or best on held-out samples (--validation-fraction)")
    early_stop: int | None = setting(
        None, "N", "stop when N evaluations in a row find no better model on held-out samples (--validation-fraction)"
    )
    time_budget: str = setting(
        "none",
        "TIME",
        "how long the run may take, as in 90s, 10m or 1h30m: steps are chosen for it, and --epochs does not count",
    )
    resume: bool = setting(False, "", "go on from the newest checkpoint in --run-dir, or start when there is none")
    resume_inexact: bool = setting(
        False,
        "",
        "with --resume: go on although threads, versions, processor or number of ranks changed, hence not bit for bit",
    )
    tensorboard: bool = setting(False, "", "write event files for TensorBoard into the run directory too")
    quiet: bool = setting(False, "", "say nothing but errors; log.txt in the run directory has the lines")
    json: bool = setting(False, "", "print the summary as the last line")

    def __post_init__(self) -> None:
        rule(not self.resume or self.run_dir is not None, "resume", True, "given together with --run-dir DIR")
        rule(not self.resume_inexact or self.resume, "resume-inexact", True, "given together with --resume")
        rule(0 <= self.seed < 2**63, "seed", self.seed, "in 0..2^63-1")
        ok = self.threads is None or 1 <= self.threads <= MOST_THREADS
        rule(ok, "threads", self.threads, f"at least 1 and at most {MOST_THREADS}")
        if self.checkpoint_every != "auto":
            parse_cadence("checkpoint-every", self.checkpoint_every)
        one_of("keep", self.keep, ("last", "best"))
        rule(self.early_stop is None or self.early_stop >= 1, "early-stop", self.early_stop, "at least 1 evaluation")
        self.budget_seconds()
        rule(self.evaluate_every >= 1, "evaluate-every", self.evaluate_every, "at least 1 epoch")

    def budget_seconds(self) -> float | None:
        """Return the seconds that the run may take, None for as long as --epochs makes it."""
        return parse_duration("time-budget", self.time_budget)

    def checkpoint_steps(self, steps_per_epoch: int) -> int | None:
        """Return the optimizer steps between two checkpoints, 0 for none; None where their cost decides."""
        if self.checkpoint_every == "auto":
            return None
        number, unit = parse_cadence("checkpoint-every", self.checkpoint_every)
        return number if unit == "steps" else number * steps_per_epoch

    def evaluates(self, epoch: int) -> bool:
        """Tell whether epoch `epoch`, the first is 0, ends with an evaluation; the last one does in any case."""
        return (epoch + 1) % self.evaluate_every == 0
