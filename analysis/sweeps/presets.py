"""A run that is planned, and the scales on which experiments plan theirs.

A preset says on what scale: `smoke` sees that everything runs, `reduced` fits a machine with 2 cores, `full` is the
setting of the study. Within a preset one factor at a time differs from the defaults below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from hvfreeze.config.tree import Config, from_dict

T = TypeVar("T")
Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to be: what to start, and on how many ranks."""

    label: str
    """What the runs that differ in the seed only have in common."""
    seed: int
    flags: Mapping[str, Value]
    """Leaves of the configuration; paths of data and weights are added when it starts."""
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
        return from_dict({**self.flags, "seed": self.seed}, source=f"run {self.name}")

    def identity(self) -> dict[str, Any]:
        """Return all that makes this run the run it is, as kept with its logs."""
        return {**dataclasses.asdict(self), "flags": dict(self.flags)}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The scale of an experiment, and the defaults around which one factor at a time is changed."""

    name: str
    data: str
    model: str
    train_samples: int | None
    test_samples: int
    image_size: int
    batch_size: int
    """Samples per rank and step at `ranks` ranks."""
    epochs: int
    lr: float
    schedule: str
    seeds: tuple[int, ...]
    lr_seeds: tuple[int, ...]
    """Seeds of the runs that choose a learning rate, whatever other seeds are asked for."""
    ranks: int
    vote_ranks: int
    vote_epochs: int
    """Epochs of the runs at `vote_ranks` ranks, which take longest."""
    checkpoint_every: str
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
        flags: dict[str, Value] = {
            "data": self.data,
            "model": self.model,
            "image_size": self.image_size,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "lr": self.lr,
            "schedule": self.schedule,
            "checkpoint_every": self.checkpoint_every,
        }
        if self.train_samples is not None:
            flags["train_samples"] = self.train_samples
        if self.weights != "none":
            flags["weights"] = self.weights
        return flags

    def run(
        self,
        label: str,
        seed: int,
        changes: Mapping[str, Value] = MappingProxyType({}),
        *,
        ranks: int | None = None,
        program: str = "hvfreeze",
        nodes: int = 0,
        bandwidth: str = "",
    ) -> PlannedRun:
        """Return a run with these flags changed."""
        return PlannedRun(
            label=label,
            seed=seed,
            flags={**self.common(), **changes},
            ranks=self.ranks if ranks is None else ranks,
            program=program,
            nodes=nodes,
            bandwidth=bandwidth,
        )

    def few(self, options: Sequence[T]) -> list[T]:
        """Return the options, in the smoke preset only the last."""
        return list(options[-1:] if self.is_smoke else options)

    @property
    def is_smoke(self) -> bool:
        """Whether this only sees that everything runs."""
        return self.name == "smoke"


SMOKE = Preset(
    name="smoke",
    data="digits",
    model="shufflenet_v2_x0_5",
    train_samples=64,
    test_samples=360,
    image_size=32,
    batch_size=8,
    epochs=2,
    lr=0.02,
    schedule="cosine",
    seeds=(0,),
    lr_seeds=(0,),
    ranks=2,
    vote_ranks=2,
    vote_epochs=2,
    checkpoint_every="0",
    coarse="stage",
)
REDUCED = Preset(
    name="reduced",
    data="cifar10",
    model="resnet18",
    train_samples=5_000,
    test_samples=10_000,
    image_size=32,
    batch_size=128,
    epochs=10,
    lr=0.02,
    schedule="cosine",
    seeds=(0, 1, 2),
    lr_seeds=(0, 1),
    ranks=2,
    vote_ranks=4,
    vote_epochs=4,
    checkpoint_every="5",
)
FULL = Preset(
    name="full",
    data="cifar10",
    model="resnet18",
    train_samples=None,
    test_samples=10_000,
    image_size=32,
    batch_size=128,
    epochs=50,
    lr=0.1,
    schedule="constant",
    seeds=(0, 1, 2),
    lr_seeds=(0, 1),
    ranks=4,
    vote_ranks=4,
    vote_epochs=50,
    checkpoint_every="10",
)
PRESETS = {preset.name: preset for preset in (SMOKE, REDUCED, FULL)}
