"""A configuration: the tree of all sections, and the same as nested dicts and as a YAML file.

It comes from a YAML file (`--config`), from command line flags that override it, or from Python. The leaves of the tree
have unique names.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvfreeze.config.model import HeadConfig, ModelConfig
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.plain_yaml import MOST_BYTES, parse_plain_yaml
from hvfreeze.config.rules import rule
from hvfreeze.config.run import RunConfig
from hvfreeze.config.sections import AUTO, CacheConfig, DataConfig, FreezeConfig
from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.errors import UsageError

SOLVED = ("static", 1)
"""Criterion and cut of a run whose head is solved: its two blocks are the features and the head."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run; a part of the program receives its own section, not the tree.

    A section's flags stand under its `title` in the help.
    """

    data: DataConfig = field(default_factory=DataConfig, metadata={"title": "data"})
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"title": "model"})
    head: HeadConfig = field(default_factory=HeadConfig, metadata={"title": "head"})
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata={"title": "optimizer"})
    strategy: StrategyConfig = field(default_factory=StrategyConfig, metadata={"title": "strategy"})
    freeze: FreezeConfig = field(default_factory=FreezeConfig, metadata={"title": "freezing"})
    cache: CacheConfig = field(default_factory=CacheConfig, metadata={"title": "activation cache"})
    run: RunConfig = field(default_factory=RunConfig, metadata={"title": "run"})

    def __post_init__(self) -> None:
        if self.cache.cache == "on" and not self.freeze.auto:
            wanted = "used with --augment none or views:K"
            rule(self.data.cacheable(), "cache", "on", wanted, "fresh draws never come again")
        if self.data.shuffle == "global" and self.cache.cache == "on":
            rule(self.cache.cache_shared, "shuffle", "global", "used with --cache off or together with --cache-shared")
        held_out = self.data.validation_fraction > 0
        why = "what is chosen must be chosen on held-out samples, never on the test set"
        with_it = "given together with --validation-fraction F, such as 0.1"
        rule(held_out or self.run.keep == "last", "keep", self.run.keep, with_it, why)
        rule(held_out or self.run.early_stop is None, "early-stop", self.run.early_stop, with_it, why)
        heads = self.optimizer.head_rates() or []
        many = self.strategy.strategy == "shared-trunk"
        rule(many or len(heads) < 2, "head-lr", self.optimizer.head_lr, "one number: there is one head")
        rule(not heads or self.strategy.tasks is None, "head-lr", self.optimizer.head_lr, "left out with --tasks")
        if self.freeze.auto:
            self._check_auto()
        elif self.head.solved:
            fixed = "none or views:K with --head-fit exact or kernel"
            rule(self.data.cacheable(), "augment", self.data.augment, fixed, "it fits fixed views of each sample")
            given = (self.freeze.freeze, self.freeze.cut)
            alone = "left out with --head-fit exact or kernel, which freezes every block but the head"
            rule(given in (("none", None), SOLVED), "freeze", self.freeze.freeze, alone)
            rule(
                self.optimizer.accumulate == 1,
                "accumulate",
                self.optimizer.accumulate,
                "1 with --head-fit exact or kernel",
            )
            settings = self.optimizer
            rule(
                not settings.mixup,
                "mixup",
                settings.mixup,
                "left out with --head-fit exact or kernel, which fits every sample",
            )
            kernel = self.head.head_fit == "kernel"
            rule(self.head.head != "last" or not kernel, "head", self.head.head, "multi-level with --head-fit kernel")
            replicas = self.strategy.strategy == "replicas"
            rule(replicas, "strategy", self.strategy.strategy, "replicas with --head-fit exact or kernel")

    def _check_auto(self) -> None:
        rule(
            self.head.solved,
            "head-fit",
            self.head.head_fit,
            "exact or kernel with --freeze auto, which solves its head",
        )
        rule(self.strategy.strategy == "replicas", "strategy", self.strategy.strategy, "replicas with --freeze auto")
        rule(self.run.keep == "last", "keep", self.run.keep, "last with --freeze auto, which keeps what is best itself")
        stop = self.run.early_stop
        rule(stop is None, "early-stop", stop, "left out with --freeze auto, whose stages last as long as was planned")

    def resolved(self) -> Config:
        """Return this configuration with what follows from others of its settings.

        --blocks auto is residual for the grid, which shares blocks out evenly, else stage. A solved head is one
        epoch, and the head alone free; with --freeze auto that holds for some of the run's stages, not for the run. The
        model's own last layer can be solved, but not compare rows.
        """
        if self.model.blocks == "auto":
            fine = self.strategy.strategy == "grid"
            model = dataclasses.replace(self.model, blocks="residual" if fine else "stage")
            return dataclasses.replace(self, model=model).resolved()
        if self.freeze.auto and self.head.head == "last" and self.head.head_fit == "kernel":
            return dataclasses.replace(self, head=dataclasses.replace(self.head, head_fit="exact")).resolved()
        if not self.head.solved or self.freeze.auto:
            return self
        freeze, cut = SOLVED
        return dataclasses.replace(
            self,
            optimizer=dataclasses.replace(self.optimizer, epochs=1),
            freeze=dataclasses.replace(self.freeze, freeze=freeze, cut=cut),
        )

    @property
    def data_seed(self) -> int:
        """The seed of subset, shards, order and views."""
        return self.run.seed if self.data.data_seed is None else self.data.data_seed


def leaves() -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Return for each flag (with underscores) its section, its dataclass field and its type."""
    found: dict[str, tuple[str, dataclasses.Field[Any], Any]] = {}
    for name, cls in typing.get_type_hints(Config).items():
        types = typing.get_type_hints(cls)
        for leaf in dataclasses.fields(cls):
            found[leaf.name] = (name, leaf, types[leaf.name])
    return found


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the tree as nested plain dicts, as written to config.yaml."""
    return dataclasses.asdict(config)


def from_dict(tree: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Build a Config from nested dicts; a flat dict of flag names is accepted too.

    What is not given has its default, with --freeze auto the one for that.

    Raises:
        UsageError: an unknown key, a wrong type or a value out of its range; the message names `source`.
    """
    known = leaves()
    types = typing.get_type_hints(Config)
    sections: dict[str, dict[str, Any]] = {section: {} for section in types}
    given = flat(tree, source=source)
    if given.get("freeze") == AUTO:
        given = auto_defaults(given) | given
    for leaf, value in given.items():
        section, _, kind = known[leaf]
        sections[section][leaf] = typed(leaf, value, kind, source=source)
    config = Config(**{section: types[section](**entries) for section, entries in sections.items()})
    cut, freeze = config.freeze.cut, config.freeze.freeze
    rule(cut is None or freeze in ("static", AUTO), "cut", cut, "left out unless --freeze is static or auto")
    return config


def auto_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what leaves are with --freeze auto where nothing is given; rates are those of SGD, and left to others."""
    known = {name: leaf.metadata["auto"] for name, (_, leaf, _) in leaves().items()}
    others = () if given.get("optimizer") in (None, "sgd") else ("lr", "weight_decay")
    return {name: value for name, value in known.items() if value is not None and name not in others}


def flat(tree: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the leaves of a configuration by name, their values as they are.

    Raises:
        UsageError: an unknown section or key, or a key in another section than its own.
    """
    known = leaves()
    sections = typing.get_type_hints(Config)
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key).replace("-", "_")
        section = name if isinstance(value, Mapping) else None
        if section is not None and section not in sections:
            raise UsageError(f"{source}: unknown section '{key}'{did_you_mean(section, sections)}")
        for leaf, entry in value.items() if section is not None else [(name, value)]:
            leaf = str(leaf).replace("-", "_")
            if leaf not in known or section not in (None, known[leaf][0]):
                raise UsageError(f"{source}: unknown key '{leaf}'{did_you_mean(leaf, known)}")
            found[leaf] = entry
    return found


def typed(leaf: str, value: Any, kind: Any, *, source: str) -> Any:
    """Return `value` as the leaf's type; numbers are accepted where text is wanted (lists of weights, counts).

    Raises:
        UsageError: `value` has another type.
    """
    options = typing.get_args(kind) or (kind,)
    if value is None and type(None) in options:
        return None
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if str in options and not isinstance(value, bool):
        if isinstance(value, list) and all(isinstance(entry, (int, float, str)) for entry in value):
            return ",".join(str(entry) for entry in value)
        if isinstance(value, (int, float)):
            return str(value)
    for option in options:
        if type(value) is option:
            return value
    names = " or ".join(option.__name__ for option in options if option is not type(None))
    raise UsageError(f"{source}: {leaf} ({value!r}) must be of type {names}")


def did_you_mean(word: str, known: Mapping[str, object]) -> str:
    """Return a hint at the closest known key, or the empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file without building anything but plain values.

    Raises:
        UsageError: the file cannot be read, is no plain YAML, or is no mapping.
    """
    try:
        with path.open("rb") as file:
            tree = parse_plain_yaml(file.read(MOST_BYTES + 1))
    except OSError as error:
        raise UsageError(f"--config ({path}) cannot be read: {error}") from error
    except ValueError as error:
        raise UsageError(f"--config ({path}) is not plain YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"--config ({path}) must be a mapping of keys to values, not a {type(tree).__name__}")
    return tree
