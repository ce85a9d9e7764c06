"""The sections of a configuration: frozen dataclasses, checked on construction.

A field is one setting, declared once: its name is the flag's (`eta_max` is `--eta-max`) and the key's in a file, its
text is what `--help` says. Names are unique over all sections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvfreeze.config.rules import (
    number_list,
    one_of,
    parse_bytes,
    parse_channels,
    parse_dirichlet,
    parse_parts,
    parse_recipe,
    parse_views,
    rule,
    setting,
)
from hvfreeze.named_code import check_named_code, is_named_code

Channels = tuple[float, float, float]
DATA_SETS = ("digits", "cifar10", "cifar100", "imagefolder")
CRITERIA = ("gradient-norm", "percentile", "linear", "geometric")
"""What proposes a cut; `freezing/voting/criteria.py` says how."""
AUTO = "auto"
"""A value of --freeze that is no criterion: stages that solve the head and tune blocks, see `training/stages`."""
AUTO_PARTS = ("votes", "guard", "last-solve")
VOTE_WEIGHTS = ("uniform", "samples", "loss", "coverage", "snr")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples are trained on, who gets them and how they are augmented."""

    data: str = setting("digits", "NAME", "digits, cifar10, cifar100, imagefolder, or package:function")
    data_dir: str | None = setting(None, "DIR", "where the data lies; default $HVFREEZE_DATA or a cache directory")
    train_samples: int | None = setting(None, "N", "train on a stratified subset of N samples")
    validation_fraction: float = setting(0.0, "F", "hold out this part of the training set, and evaluate on it alone")
    image_size: int | None = setting(None, "PIXELS", "resize images; default: the data's own size")
    resize: int | None = setting(
        None, "PIXELS", "resize to this first; training crops --image-size out of it, evaluation takes the centre"
    )
    mean: str | None = setting(
        None, "M", "normalise with this mean, one for all channels or three; default: the weights', else the data's"
    )
    std: str | None = setting(None, "S", "normalise with this standard deviation, given together with --mean")
    data_seed: int | None = setting(None, "SEED", "seed of subset, shards, order and views; default: --seed")
    shuffle: str = setting(
        "shard", "HOW", "shard (fixed shards, shuffled inside) or global (dealt out anew each epoch)"
    )
    partition: str = setting("iid", "HOW", "iid, or dirichlet:A for label skew between ranks")
    shard_sizes: str = setting("equal", "HOW", "equal, or one relative size per rank, as in 3,1,1,1")
    skip_bad: bool = setting(
        False, "", "leave out images that cannot be decoded, which are looked for before the start"
    )
    augment: str = setting(
        "fresh", "HOW", "fresh (new draws every epoch), none, or views:K (K fixed views of each sample)"
    )

    recipe: str = setting(
        "crop",
        "LIST",
        "how views are made: crop (out of a black border) or random-resized-crop, with trivial-augment, color-jitter",
    )

    def __post_init__(self) -> None:
        if is_named_code(self.data):
            check_named_code("data", self.data)
        else:
            one_of("data", self.data, DATA_SETS)
        rule(self.data != "imagefolder" or bool(self.data_dir), "data", self.data, "given together with --data-dir DIR")
        rule(self.train_samples is None or self.train_samples > 0, "train-samples", self.train_samples, "at least 1")
        rule(0 <= self.validation_fraction < 1, "validation-fraction", self.validation_fraction, "in [0, 1)")
        rule(self.image_size is None or 1 <= self.image_size <= 4096, "image-size", self.image_size, "in 1..4096")
        larger = self.resize is None or (self.image_size is not None and self.image_size <= self.resize <= 4096)
        rule(larger, "resize", self.resize, "given together with --image-size, at least that and at most 4096")
        self.statistics()
        one_of("shuffle", self.shuffle, ("shard", "global"))
        parse_views(self.augment)
        used = parse_recipe(self.recipe) == ("crop",) or self.augment != "none"
        rule(used, "recipe", self.recipe, "left out with --augment none, which shows every sample as it is")
        parse_dirichlet(self.partition)
        if self.shard_sizes != "equal":
            sizes = number_list("shard-sizes", self.shard_sizes)
            ok = all(math.isfinite(s) and s > 0 for s in sizes)
            rule(ok, "shard-sizes", self.shard_sizes, "equal, or one positive, finite number per rank")

    @property
    def stored_size(self) -> int | None:
        """Side of the squares that images are decoded to; None keeps their size."""
        return self.resize or self.image_size

    def statistics(self) -> tuple[Channels, Channels] | None:
        """Return the mean and standard deviation that were given, of each channel; None where they were not."""
        if self.mean is None and self.std is None:
            return None
        rule(self.mean is not None and self.std is not None, "mean", self.mean, "given together with --std")
        mean, std = parse_channels("mean", self.mean or ""), parse_channels("std", self.std or "")
        rule(all(number > 0 for number in std), "std", self.std, "above 0")
        return mean, std

    def cacheable(self) -> bool:
        """Tell whether a sample's view can come again, so that its activations are worth keeping."""
        return self.augment != "fresh"


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Who proposes a cut, when, and how the ranks vote on it."""

    freeze: str = setting(
        "none",
        "CRITERION",
        "none, static, gradient-norm, percentile, linear, geometric, or auto (solve the head, tune blocks where "
        "--epochs has room, solve it again)",
    )
    cut: int | None = setting(
        None, "K", "with --freeze static: the first K blocks are frozen; with auto: they are while the others are tuned"
    )
    interval: int | None = setting(None, "STEPS", "steps between votes; default: half an epoch")
    freeze_warmup: int | None = setting(None, "STEPS", "steps before the first vote; default: one epoch")
    patience: int = setting(1, "N", "a rank proposes what its criterion wanted N times in a row")
    eta_max: float = setting(0.2, "ETA", "a block whose gradient norm changes faster is not frozen")
    signal: str = setting(
        "local", "WHICH", "gradients that the criterion sees: local (each rank's own) or averaged (no real vote)"
    )
    vote_weight: str = setting("uniform", "HOW", "uniform, samples, loss, coverage, snr, or one number per rank")
    quorum: float = setting(0.5, "Q", "part of the weight that must support a cut, in (0, 1]")
    shadow: str = setting("none", "LIST", "criteria that are scored and logged without effect")
    auto_without: str = setting(
        "none", "LIST", "with --freeze auto: leave out votes, guard (keep what is best on held-out samples), last-solve"
    )

    def __post_init__(self) -> None:
        one_of("freeze", self.freeze, ("none", "static", *CRITERIA, AUTO))
        static = self.freeze == "static"
        # A criterion's own settings may start at a cut, where blocks are tuned; users give it with static and auto.
        starts = self.freeze != "none" or self.cut is None
        rule(starts, "cut", self.cut, "left out unless --freeze is static or auto")
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
            rule(name in CRITERIA, "shadow", name, "none or a list out of " + ", ".join(CRITERIA))
        without = self.auto_without
        rule(self.auto or without == "none", "auto-without", without, "left out unless --freeze is auto")
        parse_parts("auto-without", without, AUTO_PARTS)

    @property
    def votes(self) -> bool:
        """Whether ranks vote on the cut."""
        return self.freeze in CRITERIA

    @property
    def auto(self) -> bool:
        """Whether the run is a row of stages, in which the head is solved and blocks are tuned."""
        return self.freeze == AUTO

    def has(self, part: str) -> bool:
        """Tell whether a part of --freeze auto, one of `AUTO_PARTS`, is not left out."""
        return part not in parse_parts("auto-without", self.auto_without, AUTO_PARTS)

    def shadow_names(self) -> tuple[str, ...]:
        """Return the criteria that are scored and logged without effect."""
        return () if self.shadow == "none" else tuple(self.shadow.split(","))


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Whether and where the frozen prefix's activations are kept."""

    cache: str = setting("off", "MODE", "off, auto (when it pays) or on; needs --augment none or views:K")
    cache_dir: str | None = setting(None, "DIR", "where its files stay after the run; default: the run directory")
    cache_dtype: str = setting("native", "TYPE", "native (exact), float16 or bfloat16")
    cache_limit: str = setting("none", "SIZE", "disk space over all ranks, as in 20G; default: none")
    cache_shared: bool = setting(
        False,
        "",
        "ranks may read each other's files on a shared file system; files of other users and groups are trusted",
    )
    cache_failure: str = setting(
        "recompute", "HOW", "on a full disk or a damaged file: recompute (go on without it) or stop"
    )

    def __post_init__(self) -> None:
        one_of("cache", self.cache, ("off", "auto", "on"))
        one_of("cache-dtype", self.cache_dtype, ("native", "float16", "bfloat16"))
        one_of("cache-failure", self.cache_failure, ("recompute", "stop"))
        self.limit_bytes()

    def limit_bytes(self) -> int | None:
        """Return the budget in bytes over all ranks, None where there is none."""
        return parse_bytes("cache-limit", self.cache_limit)
