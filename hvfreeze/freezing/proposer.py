"""When votes are held, and what each criterion, deciding or in the shadow, has seen since its cut last moved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.criteria import CRITERIA, NEEDS_GRADIENTS, Evidence


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When votes are held, in optimizer steps, and how long training lasts."""

    interval: int
    warmup: int
    steps_per_epoch: int
    num_epochs: int

    @classmethod
    def of(cls, settings: FreezeConfig, *, steps_per_epoch: int, num_epochs: int) -> Cadence:
        """Return the settings' cadence: by default votes twice an epoch, from the end of the first epoch on."""
        return cls(
            interval=settings.interval or max(1, steps_per_epoch // 2),
            warmup=steps_per_epoch if settings.freeze_warmup is None else settings.freeze_warmup,
            steps_per_epoch=steps_per_epoch,
            num_epochs=num_epochs,
        )

    def ends_interval(self, step: int) -> bool:
        """Tell whether an interval ends after `step` steps; the first vote's interval ends at the warm-up's end."""
        return step > 0 and (step - self.warmup) % self.interval == 0

    def votes(self, step: int) -> bool:
        """Tell whether there is a vote after `step` steps; a vote after the last step could save nothing."""
        return self.ends_interval(step) and step >= self.warmup and step < self.steps_per_epoch * self.num_epochs


@dataclass
class Track:
    """How one criterion, deciding or in the shadow, has fared: its cut and what it has seen since that cut."""

    name: str
    cut: int = 0
    intervals: int = 0
    """Complete intervals at this cut; -1 until the one after a change, which is dropped, is over."""
    recent: list[int] = field(default_factory=list)

    def moved(self, cut: int) -> None:
        """Forget what was seen at the old cut."""
        self.cut, self.intervals, self.recent = cut, -1, []

    def propose(self, evidence: Evidence, patience: int) -> int:
        """Return the cut that the criterion has wanted at least for `patience` intervals in a row."""
        usable = self.intervals >= 2 or self.name not in NEEDS_GRADIENTS
        seen = evidence if usable else replace(evidence, previous_norms=None, norms=None)
        self.recent = [*self.recent, CRITERIA[self.name](replace(seen, cut=self.cut)).cut][-patience:]
        return min(self.recent) if len(self.recent) == patience else self.cut
