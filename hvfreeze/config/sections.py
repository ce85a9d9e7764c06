"""What a run is: one tree of frozen dataclasses, checked on construction.

A run's configuration comes from a YAML file (`--config`), from command line flags that override it, or from Python.
The leaves of the tree have unique names, and each is the command line flag of that name (`eta_max` is `--eta-max`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from hvfreeze.errors import UsageError

DATA_SETS = ("digits", "cifar10", "cifar100", "imagefolder")
CRITERIA = ("none", "static", "gradient-norm", "percentile", "linear", "geometric")
VOTE_WEIGHTS = ("uniform", "samples", "loss", "coverage", "snr")


def rule(ok: bool, flag: str, value: object, wanted: str, remedy: str = "") -> None:
    """Raise UsageError naming the flag, its value, the rule and the way out unless `ok`."""
    if not ok:
        raise UsageError(f"--{flag} ({value}) must be {wanted}" + (f"; {remedy}" if remedy else ""))


def one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    rule(value in choices, flag, value, "one of " + ", ".join(choices))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples are trained on, who gets them and how they are augmented."""

    data: str = "digits"
    data_dir: str | None = None
    train_samples: int | None = None
    """Size of the stratified subset of the training set; None is all of it."""
    validation_fraction: float = 0.0
    image_size: int | None = None
    """Pixels; None is the data's own size."""
    data_seed: int | None = None
    """Drives subset, shards, order and views; None is the run's seed."""
    shuffle: str = "shard"
    partition: str = "iid"
    shard_sizes: str = "equal"
    augment: str = "fresh"

    def __post_init__(self) -> None:
        one_of("data", self.data, DATA_SETS)
        rule(self.data != "imagefolder" or bool(self.data_dir), "data", self.data, "given together with --data-dir DIR")
        rule(self.train_samples is None or self.train_samples > 0, "train-samples", self.train_samples, "at least 1")
        rule(0 <= self.validation_fraction < 1, "validation-fraction", self.validation_fraction, "in [0, 1)")
        rule(self.image_size is None or 1 <= self.image_size <= 4096, "image-size", self.image_size, "in 1..4096")
        one_of("shuffle", self.shuffle, ("shard", "global"))
        views = re.fullmatch(r"views:([1-9]\d*)", self.augment)
        rule(
            self.augment in ("fresh", "none") or views is not None,
            "augment",
            self.augment,
            "fresh, none or views:K with K >= 1",
        )
        dirichlet = re.fullmatch(r"dirichlet:([0-9.eE+-]+)", self.partition)
        alpha = float_or_nan(dirichlet.group(1)) if dirichlet else math.nan
        rule(
            self.partition == "iid" or alpha > 0,
            "partition",
            self.partition,
            "iid or dirichlet:A with A > 0",
        )
        if self.shard_sizes != "equal":
            sizes = number_list("shard-sizes", self.shard_sizes)
            rule(all(s > 0 for s in sizes), "shard-sizes", self.shard_sizes, "equal, or one positive number per rank")

    def cacheable(self) -> bool:
        """Tell whether a sample's view can come again, so that its activations are worth keeping."""
        return self.augment != "fresh"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network, where it may be cut, and what it starts from."""

    model: str = "resnet18"
    blocks: str = "stage"
    weights: str = "none"

    def __post_init__(self) -> None:
        rule(bool(self.model), "model", repr(self.model), "the name of a torchvision classification model")
        rule(bool(self.blocks), "blocks", repr(self.blocks), "stage, residual, paper or NAME,NAME,...")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """SGD and its schedule."""

    epochs: int = 10
    batch_size: int = 128
    """Samples per rank and step."""
    lr: float = 0.1
    """Used as given, never multiplied by the world's size."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: str = "constant"
    lr_warmup: int = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    compression: str = "none"
    precision: str = "float32"

    def __post_init__(self) -> None:
        rule(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        rule(self.batch_size >= 1, "batch-size", self.batch_size, "at least 1")
        rule(math.isfinite(self.lr) and self.lr > 0, "lr", self.lr, "a positive number")
        rule(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        rule(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0,
            "weight-decay",
            self.weight_decay,
            "0 or a positive number",
        )
        one_of("schedule", self.schedule, ("constant", "step", "cosine"))
        rule(self.lr_warmup >= 0, "lr-warmup", self.lr_warmup, "0 or more steps")
        one_of("compression", self.compression, ("none", "fp16"))
        one_of("precision", self.precision, ("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Who proposes a cut, when, and how the ranks vote on it."""

    freeze: str = "none"
    cut: int | None = None
    interval: int | None = None
    """Steps between votes; None is half an epoch."""
    freeze_warmup: int | None = None
    """Steps before the first vote; None is one epoch."""
    patience: int = 1
    eta_max: float = 0.2
    signal: str = "local"
    vote_weight: str = "uniform"
    quorum: float = 0.5
    shadow: str = "none"

    def __post_init__(self) -> None:
        one_of("freeze", self.freeze, CRITERIA)
        static = self.freeze == "static"
        rule(static or self.cut is None, "cut", self.cut, "left out unless --freeze is static")
        rule(not static or self.cut is not None, "freeze", self.freeze, "given together with --cut K")
        rule(self.cut is None or self.cut >= 0, "cut", self.cut, "0 or more blocks")
        rule(self.interval is None or self.interval >= 1, "interval", self.interval, "at least 1 step")
        rule(self.freeze_warmup is None or self.freeze_warmup >= 0, "freeze-warmup", self.freeze_warmup, "0 or more")
        rule(self.patience >= 1, "patience", self.patience, "at least 1")
        rule(self.eta_max > 0, "eta-max", self.eta_max, "a positive number (inf for no bound)")
        one_of("signal", self.signal, ("local", "averaged"))
        rule(0 < self.quorum <= 1, "quorum", self.quorum, "in (0, 1]")
        if self.vote_weight not in VOTE_WEIGHTS:
            weights = number_list("vote-weight", self.vote_weight, also=", ".join(VOTE_WEIGHTS))
            ok = all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0
            rule(ok, "vote-weight", self.vote_weight, "finite numbers, none negative, not all 0")
        for name in self.shadow_names():
            rule(name in CRITERIA[2:], "shadow", name, "none or a list out of " + ", ".join(CRITERIA[2:]))

    def shadow_names(self) -> tuple[str, ...]:
        """Return the criteria that are scored and logged without effect."""
        return () if self.shadow == "none" else tuple(self.shadow.split(","))


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Whether and where the frozen prefix's activations are kept."""

    cache: str = "off"
    cache_dir: str | None = None
    """None is the run directory."""
    cache_dtype: str = "native"
    cache_limit: str = "none"
    """Bytes over all ranks, with an optional suffix K, M, G or T (powers of 1024); `none` is no limit."""
    cache_shared: bool = False
    cache_failure: str = "recompute"

    def __post_init__(self) -> None:
        one_of("cache", self.cache, ("off", "auto", "on"))
        one_of("cache-dtype", self.cache_dtype, ("native", "float16", "bfloat16"))
        one_of("cache-failure", self.cache_failure, ("recompute", "stop"))
        self.limit_bytes()

    def limit_bytes(self) -> int | None:
        """Return the budget in bytes over all ranks, None where there is none."""
        if self.cache_limit == "none":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", self.cache_limit)
        rule(match is not None, "cache-limit", self.cache_limit, "none or a size such as 500M or 20G")
        assert match is not None
        return int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2) or " "))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run keeps its files, how it starts and what it starts from."""

    seed: int = 0
    threads: int | None = None
    run_dir: str | None = None
    checkpoint_every: str = "1"
    """Epochs, or steps with the suffix `s` (`200s`), between checkpoints; 0 is none."""
    evaluate_every: int = 1
    """Epochs between evaluations; the last epoch is evaluated always."""
    resume: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        rule(not self.resume or self.run_dir is not None, "resume", True, "given together with --run-dir DIR")
        rule(0 <= self.seed < 2**63, "seed", self.seed, "in 0..2^63-1")
        rule(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")
        ok = re.fullmatch(r"\d+s?", self.checkpoint_every) is not None
        rule(ok, "checkpoint-every", self.checkpoint_every, "a number of epochs, or of steps with the suffix s")
        rule(self.evaluate_every >= 1, "evaluate-every", self.evaluate_every, "at least 1 epoch")

    def checkpoint_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps between two checkpoints, 0 for none."""
        if self.checkpoint_every.endswith("s"):
            return int(self.checkpoint_every[:-1])
        return int(self.checkpoint_every) * steps_per_epoch

    def evaluates(self, epoch: int, *, epochs: int) -> bool:
        """Tell whether epoch `epoch` of 0..`epochs`-1 ends with an evaluation."""
        return (epoch + 1) % self.evaluate_every == 0 or epoch + 1 == epochs


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    freeze: FreezeConfig = field(default_factory=FreezeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.cache.cache == "on":
            rule(
                self.data.cacheable(),
                "cache",
                "on",
                "used with --augment none or views:K",
                "fresh draws never come again",
            )
        if self.data.shuffle == "global" and self.cache.cache == "on":
            rule(self.cache.cache_shared, "shuffle", "global", "used with --cache off or together with --cache-shared")

    @property
    def data_seed(self) -> int:
        """The seed of subset, shards, order and views."""
        return self.run.seed if self.data.data_seed is None else self.data.data_seed


def float_or_nan(text: str) -> float:
    """Return `text` as a number, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_list(flag: str, text: str, *, also: str = "") -> list[float]:
    """Parse `text` as numbers separated by commas.

    Raises:
        UsageError: an entry is no number.
    """
    numbers = [float_or_nan(entry) for entry in text.split(",")]
    wanted = (also + ", or " if also else "") + "numbers separated by commas, one per rank"
    rule(not any(math.isnan(n) for n in numbers), flag, text, wanted)
    return numbers
