"""The settings of freezing: which blocks are frozen, and how ranks vote on it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from hvfreeze.config.head import TRAINED
from hvfreeze.config.section import Alternative, Count, Positive, Section, Steps, given_to, setting
from hvfreeze.rules import Must, at_least, choice, number_list, parse_parts, reads, rule

CRITERIA = ("coherence", "gradient-norm", "percentile", "linear", "geometric")
"""The criteria that propose a cut; `freezing/criteria.py` defines them."""
WATCH_NORMS = ("gradient-norm", "percentile")
"""The criteria that use gradient norms."""
AUTO = "auto"
"""The value of --freeze in `hvfreeze auto`; it is not a criterion."""
AUTO_PARTS = ("votes", "guard", "last-solve")
VOTE_WEIGHTS = ("uniform", "samples", "loss", "coverage", "snr")


def check_vote_weight(text: str) -> None:
    """Raise UsageError unless `text` is one of `VOTE_WEIGHTS` or one number per rank."""
    if text not in VOTE_WEIGHTS:
        weights = number_list("vote-weight", text, also=", ".join(VOTE_WEIGHTS))
        ok = all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
        rule(ok, "vote-weight", text, "finite numbers, none negative, not all 0")


def criteria_of(config: Any) -> tuple[str, ...]:
    """Return the criteria that a run evaluates, with or without effect."""
    votes = config.freeze.auto and config.freeze.has("votes")
    return (*config.freeze.criteria(), *(("coherence",) if votes else ()))


STATIC = Alternative("--freeze static", lambda config: config.freeze.freeze in ("static", AUTO))
VOTED = Alternative(f"--freeze {', '.join(CRITERIA)}, or --shadow", lambda config: bool(criteria_of(config)))
GAINS = Alternative("--freeze coherence", lambda config: "coherence" in criteria_of(config))
NORMS = Alternative(
    "--freeze gradient-norm or percentile", lambda config: bool(set(WATCH_NORMS) & {*criteria_of(config)})
)
SEEN = Alternative(
    "--freeze gradient-norm or percentile, or --vote-weight snr",
    lambda config: NORMS.holds(config) or (VOTED.holds(config) and config.freeze.vote_weight == "snr"),
)
OF_AUTO = Alternative("hvfreeze auto", lambda config: config.freeze.auto)
BY_HAND = Alternative("hvfreeze train", lambda config: not config.freeze.auto)

Bound = Annotated[float, Must(lambda number: number > 0, "a positive number (inf for no bound)")]
Shadows = Annotated[str, reads(partial(parse_parts, "shadow", choices=CRITERIA))]
Parts = Annotated[str, reads(partial(parse_parts, "auto-without", choices=AUTO_PARTS))]
Quorum = Annotated[float, Must(lambda part: 0 < part <= 1, "above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class FreezeConfig(Section):
    """The criterion that proposes a cut, when it does so, and how the ranks vote on it."""

    freeze: Annotated[str, choice("none", "static", *CRITERIA, AUTO)] = setting(
        "none",
        "CRITERION",
        f"none, static (with --cut), or a criterion by which ranks vote: {', '.join(CRITERIA)}",
    )
    cut: Annotated[int, at_least(0, "blocks")] | None = setting(
        None, "K", "number of frozen front blocks; in hvfreeze auto while the other blocks are fine-tuned", of=STATIC
    )
    interval: Annotated[int, at_least(1, "step")] | None = setting(
        None, "STEPS", "steps between votes; default: half an epoch", of=VOTED
    )
    freeze_warmup: Steps | None = setting(None, "STEPS", "steps before the first vote; default: one epoch", of=VOTED)
    patience: Count = setting(
        1,
        "N",
        "a rank proposes a cut after its criterion wanted it in N intervals in a row; coherence: at least 2",
        of=VOTED,
    )
    eta_max: Bound = setting(0.2, "ETA", "a block is not frozen while its gradient norm changes faster", of=NORMS)
    min_gain: Positive = setting(
        0.02,
        "X",
        "freeze a block when its share of the estimated gain is below X times its share of the step time",
        of=GAINS,
    )
    statistics: Annotated[str, choice("auto", "batch", "kept")] = setting(
        "auto",
        "WHICH",
        "statistics of BatchNorm in trained blocks: batch (those of each batch), kept (the pretrained ones) or auto. "
        "auto is batch, but kept with --weights and fewer than 20 batches, and in hvfreeze auto with --optimizer or "
        "--lr",
        of=TRAINED,
    )
    signal: Annotated[str, choice("local", "averaged")] = setting(
        "local",
        "WHICH",
        "gradients that the criterion uses: local (of each rank) or averaged (no real vote)",
        of=SEEN,
    )
    vote_weight: Annotated[str, reads(check_vote_weight)] = setting(
        "uniform", "HOW", "uniform, samples, loss, coverage, snr, or one number per rank", of=VOTED
    )
    quorum: Quorum = setting(0.5, "Q", "share of the voting weight that must support a cut", of=VOTED)
    shadow: Shadows = setting("none", "LIST", "criteria that are evaluated and logged without effect")
    auto_without: Parts = setting(
        "none",
        "LIST",
        "leave out votes, guard (keep the best model on held-out samples) or last-solve (the last fit of the head)",
        of=OF_AUTO,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        static = self.freeze == "static"
        rule(not static or self.cut is not None, "freeze", self.freeze, "given together with --cut K")
        decides = "coherence" if self.auto and self.has("votes") else self.freeze
        others = self.shadow == "none" or bool(set(self.shadow_names()) - {decides})
        rule(others, "shadow", self.shadow, f"another criterion than {decides}, which decides the votes")
        own = self.signal == "local" or self.freeze != "coherence"
        rule(own, "signal", self.signal, "local with --freeze coherence, which compares the ranks' gradients")

    def of_script(self) -> FreezeConfig:
        """Return these settings with the default of a training script: coherence, if only other settings were given.

        Raises:
            UsageError: a given setting belongs to another criterion, which must be given too.
        """
        given = given_to(self)
        if not given or "freeze" in given:
            return self
        other = "given together with freeze='gradient-norm' or 'percentile', whose bound it is"
        rule("eta_max" not in given, "eta-max", self.eta_max, other)
        return replace(self, freeze="coherence")

    @property
    def votes(self) -> bool:
        """Whether ranks vote on the cut."""
        return self.freeze in CRITERIA

    @property
    def auto(self) -> bool:
        """Whether the run is one of `hvfreeze auto`."""
        return self.freeze == AUTO

    def has(self, part: str) -> bool:
        """Return True unless a part of hvfreeze auto, one of `AUTO_PARTS`, is left out."""
        return part not in parse_parts("auto-without", self.auto_without, AUTO_PARTS)

    def criteria(self) -> tuple[str, ...]:
        """Return the criteria that are evaluated at a vote: the deciding one, if any, and the shadows."""
        return (*([self.freeze] if self.votes else []), *self.shadow_names())

    def shadow_names(self) -> tuple[str, ...]:
        """Return the criteria that are evaluated and logged without effect."""
        return () if self.shadow == "none" else tuple(self.shadow.split(","))
