"""A run that is planned, and the scales on which experiments plan theirs.

A preset says on what scale: `smoke` sees that everything runs, `reduced` fits a machine with 2 cores, `full` is the
setting of the study. Within a preset one factor at a time differs from the defaults below.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvfreeze.config.tree import Config, applying, from_dict

T = TypeVar("T")
Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to be: what to start, and on how many ranks."""

    label: str
    """The common name of runs that differ only in the seed."""
    seed: int
    flags: Mapping[str, Value]
    """Settings, without the settings of other ways of training; paths of data and weights are added when it starts."""
    ranks: int
    program: str = "hvfreeze"
    """The module that takes the flags of `hvfreeze train`."""
    nodes: int = 0
    """Nodes of the local cluster; 0 is this machine itself, or the hosts given."""
    bandwidth: str = ""
    """Limit of every node's link in tc's notation; empty is none."""

    @property
    def name(self) -> str:
        """The run directory's name."""
        return f"{self.label}-s{self.seed}"

    def config(self) -> Config:
        """Return the checked configuration, without paths.

        Raises:
            UsageError: a flag or its value is not acceptable.
        """
        return self._config

    @functools.cached_property
    def _config(self) -> Config:
        source = f"run {self.name}"
        return from_dict(applying({**self.flags, "seed": self.seed}, source=source), source=source)

    def identity(self) -> dict[str, Any]:
        """Return all that makes this run the run it is, as kept with its logs."""
        return {**dataclasses.asdict(self), "flags": dict(self.flags)}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The scale of an experiment, and the defaults around which one factor at a time is changed: those of `reduced`."""

    name: str = "reduced"
    data: str = "cifar10"
    model: str = "resnet18"
    train_samples: int | None = 5_000
    test_samples: int = 10_000
    image_size: int = 32
    batch_size: int = 128
    """Samples per rank and step at `ranks` ranks."""
    epochs: int = 10
    lr: float = 0.02
    schedule: str = "cosine"
    seeds: tuple[int, ...] = (0, 1, 2)
    lr_seeds: tuple[int, ...] = (0, 1)
    """Seeds of the runs that choose a learning rate, whatever other seeds are asked for."""
    ranks: int = 2
    vote_ranks: int = 4
    vote_epochs: int = 4
    """Epochs of the runs at `vote_ranks` ranks, which take longest."""
    checkpoint_every: str = "5"
    coarse: str = "paper"
    """The split with the study's seven groups."""
    fine: str = "residual"
    """The split with a group per residual block."""
    weights: str = "none"
    """The file's name; its path comes with the site."""
    weights_digest: str = ""
    """SHA-256 of that file."""

    def common(self) -> dict[str, Value]:
        """Return the flags of every run."""
        names = ("data", "model", "image_size", "batch_size", "epochs", "lr", "schedule", "checkpoint_every")
        flags: dict[str, Value] = {name: getattr(self, name) for name in names}
        if self.train_samples is not None:
            flags["train_samples"] = self.train_samples
        if self.weights != "none":
            flags["weights"] = self.weights
        return flags

    def run(
        self, label: str, seed: int, changes: Mapping[str, Value] | None = None, ranks: int | None = None, **more: Any
    ) -> PlannedRun:
        """Return a run with these flags changed; `more` are its program, nodes and bandwidth."""
        flags = {**self.common(), **(changes or {})}
        return PlannedRun(label=label, seed=seed, flags=flags, ranks=self.ranks if ranks is None else ranks, **more)

    def runs(
        self, variants: Mapping[str, Mapping[str, Value]], common: Mapping[str, Value], *, ranks: int | None = None
    ) -> list[PlannedRun]:
        """Return a run for every seed and variant (label -> flags); a seed's runs follow each other in time."""
        return [
            self.run(label, seed, {**common, **flags}, ranks=ranks)
            for seed in self.seeds
            for label, flags in variants.items()
        ]

    def few(self, options: Sequence[T]) -> list[T]:
        """Return the options, in the smoke preset only the last."""
        return list(options[-1:] if self.is_smoke else options)

    @property
    def is_smoke(self) -> bool:
        """Whether this only checks that everything runs."""
        return self.name == "smoke"


SMOKE = Preset(
    name="smoke",
    data="digits",
    model="shufflenet_v2_x0_5",
    train_samples=64,
    test_samples=360,
    batch_size=8,
    epochs=2,
    seeds=(0,),
    lr_seeds=(0,),
    vote_ranks=2,
    vote_epochs=2,
    checkpoint_every="0",
    coarse="stage",
)
REDUCED = Preset()
FULL = Preset(
    name="full",
    train_samples=None,
    epochs=50,
    lr=0.1,
    schedule="constant",
    ranks=4,
    vote_epochs=50,
    checkpoint_every="10",
)
PRESETS = {preset.name: preset for preset in (SMOKE, REDUCED, FULL)}
