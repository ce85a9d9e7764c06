"""The configuration of a run: a tree of sections, which is also a nested dict and a YAML file of plain values.

It comes from a YAML file (`--config`), from flags that override it, or from Python. Settings have unique names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hvfreeze.config.cache import CacheConfig
from hvfreeze.config.data import TEXT, DataConfig
from hvfreeze.config.freeze import AUTO, FreezeConfig
from hvfreeze.config.head import HeadConfig
from hvfreeze.config.model import TINY_LM, ModelConfig
from hvfreeze.config.optimizer import AUTO_DEFAULTS, AUTO_RATE, OptimizerConfig
from hvfreeze.config.registry import STRATEGIES
from hvfreeze.config.run import RunConfig
from hvfreeze.config.section import By, Section, given_to
from hvfreeze.config.strategy import StrategyConfig
from hvfreeze.errors import UsageError
from hvfreeze.plain_yaml import MOST_BYTES, parse_plain_yaml
from hvfreeze.rules import rule, typed, types_of
from hvfreeze.user_code import HF, is_named_code
from hvfreeze.wording import did_you_mean

SOLVED = ("static", 1)
"""Criterion and cut of a run that fits a head: its two blocks are the features and the head."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. Most functions receive one section only.

    The help lists the flags of a section under its `title`.
    """

    data: DataConfig = field(default_factory=DataConfig, metadata={"title": "data"})
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"title": "model"})
    head: HeadConfig = field(default_factory=HeadConfig, metadata={"title": "head"})
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata={"title": "optimizer"})
    strategy: StrategyConfig = field(default_factory=STRATEGIES["replicas"], metadata={"title": "strategy"})
    freeze: FreezeConfig = field(default_factory=FreezeConfig, metadata={"title": "freezing"})
    cache: CacheConfig = field(default_factory=CacheConfig, metadata={"title": "activation cache"})
    run: RunConfig = field(default_factory=RunConfig, metadata={"title": "run"})
    given: frozenset[str] = field(default=None, compare=False)  # type: ignore[arg-type]
    """Names of the settings that were given, whatever their values; default: those passed to the sections."""

    def __post_init__(self) -> None:
        for name, section in sections().items():
            found = getattr(self, name)
            if not isinstance(found, section):
                raise UsageError(
                    f"Config: {name} ({found!r}) must be of type {section.__name__}; hvfreeze.config.tree.from_dict "
                    "makes a Config of flags by name"
                )
        if self.given is None:
            object.__setattr__(
                self, "given", frozenset().union(*(given_to(getattr(self, name)) for name in sections()))
            )
        data, cache, head, freeze = self.data, self.cache, self.head, self.freeze
        if cache.cache == "on" and not freeze.auto:
            wanted = "used with --augment none or views:K"
            rule(data.cacheable(), "cache", "on", wanted, "fresh views never repeat")
        self._check_text()
        several = self.strategy.many_heads or len(self.optimizer.head_rates() or []) < 2
        rule(several, "head-lr", self.optimizer.head_lr, "one number: there is one head")
        reads_both = data.flips != "mean" or head.head == "multi-level"
        rule(reads_both, "flips", data.flips, "auto, on or off unless --head is multi-level, as in hvfreeze auto")
        named = freeze.auto or self.optimizer.optimizer != AUTO
        rule(named, "optimizer", AUTO, "sgd, adamw or lars")
        if freeze.auto:
            self._check_auto()
        elif head.solved:
            self._check_solved()
        self._check_strategy()

    def _check_strategy(self) -> None:
        strategy, settings = self.strategy, settings_of(self)
        accepted = dict(strategy.accepts)
        if strategy.batch_statistics:
            accepted["statistics"] = ("auto", "batch"), "BatchNorm that trains uses the statistics of each batch"
        found = [(leaf, settings[leaf], settings[leaf] in values, why) for leaf, (values, why) in accepted.items()]
        for leaf, value, fits, why in [*found, *strategy.refusals(self)]:
            rule(fits, leaf.replace("_", "-"), value, f"left out with --strategy {strategy.strategy}: {why}")

    def _check_solved(self) -> None:
        solved, strategy, freeze = "with --head-fit exact or kernel", self.strategy.strategy, self.freeze
        why = "it fits fixed views of each sample"
        rule(self.data.cacheable(), "augment", self.data.augment, f"none or views:K {solved}", why)
        alone = f"left out {solved}, which freezes every block but the head"
        rule(freeze.freeze == "none" or (freeze.freeze, freeze.cut) == SOLVED, "freeze", freeze.freeze, alone)
        rule(strategy == "replicas", "strategy", strategy, f"replicas {solved}")

    def _check_text(self) -> None:
        model, text = self.model.model, self.data.data == TEXT
        rule(text or model != TINY_LM, "model", model, f"given together with --data {TEXT}", "it reads characters")
        fits = not text or model == TINY_LM or is_named_code(model)
        rule(fits, "model", model, f"{TINY_LM} or package:function with --data {TEXT}")
        fits, wanted = not text or self.strategy.reads_text, " or ".join(TEXT_STRATEGIES)
        rule(fits, "strategy", self.strategy.strategy, f"{wanted} with --data {TEXT}")
        rule(not text or self.head.head == "last", "head", self.head.head, f"last with --data {TEXT}")
        fit = self.head.head_fit
        rule(
            not (text and self.head.solved),
            "head-fit",
            fit,
            f"sgd with --data {TEXT}; hvfreeze auto cannot train on a text",
        )

    def _check_auto(self) -> None:
        fit, strategy = self.head.head_fit, self.strategy.strategy
        rule(self.head.solved, "head-fit", fit, "exact or kernel in hvfreeze auto, which fits its head")
        rule(strategy == "replicas", "strategy", strategy, "replicas in hvfreeze auto")

    def resolved(self) -> Config:
        """Return this configuration with settings that follow from other settings.

        The strategy determines --blocks auto. A run that only fits a head has one epoch and frozen blocks.
        """
        if self.model.blocks == "auto":
            model = dataclasses.replace(self.model, blocks=self.strategy.blocks)
            return dataclasses.replace(self, model=model).resolved()
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
        """The seed of the subset, the shards, the order and the views."""
        return self.run.seed if self.data.data_seed is None else self.data.data_seed


TEXT_STRATEGIES = tuple(name for name, kind in STRATEGIES.items() if kind.reads_text)


@cache
def sections() -> dict[str, type[Section]]:
    """Return the class of each section by name; for the strategy, the base class."""
    return {name: kind for name, kind in types_of(Config).items() if name != "given"}


@cache
def leaves() -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Return the section, the dataclass field and the type of each setting, by name (the flag with underscores).

    A setting of several strategies has the field of the first one.
    """
    found: dict[str, tuple[str, dataclasses.Field[Any], Any]] = {}
    kind: Any
    for name, section in sections().items():
        for kind in (section, *(STRATEGIES.values() if section is StrategyConfig else ())):
            for leaf in dataclasses.fields(kind):
                found.setdefault(leaf.name, (name, leaf, types_of(kind)[leaf.name]))
    return found


def owners(leaf: str) -> list[str]:
    """Return the names of the strategies that have a setting."""
    return [name for name, kind in STRATEGIES.items() if leaf in fields_of(kind)]


def fields_of(section: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a section by name."""
    return {leaf.name: leaf for leaf in dataclasses.fields(section)}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the sections as nested plain dicts."""
    return {name: dataclasses.asdict(getattr(config, name)) for name in sections()}


def settings_of(config: Config) -> dict[str, Any]:
    """Return all settings by name."""
    return {leaf: value for section in to_dict(config).values() for leaf, value in section.items()}


def to_file(config: Config) -> dict[str, Any]:
    """Return the content of config.yaml: the settings of the chosen alternatives, and the names of the given ones."""

    def shown(section: str, leaf: str, value: Any) -> bool:
        usual = fields_of(type(getattr(config, section)))[leaf].default
        return unknown_for(config, leaf) is None or value not in (usual, *(usual.values() if type(usual) is By else ()))

    trees = to_dict(config).items()
    known = {name: {leaf: value for leaf, value in tree.items() if shown(name, leaf, value)} for name, tree in trees}
    return {**known, "given": sorted(config.given)}


def unknown_for(config: Config, leaf: str) -> str | None:
    """Return the alternative that a setting belongs to if it is not chosen, else None."""
    if leaves()[leaf][0] == "strategy" and leaf not in fields_of(type(config.strategy)):
        return f"--strategy {' or '.join(owners(leaf))}"
    found = fields_of(type(getattr(config, leaves()[leaf][0])))[leaf]
    lacking = [alternative.flags for alternative in found.metadata.get("of", ()) if not alternative.holds(config)]
    return lacking[0] if lacking else None


def check_known(config: Config, given: Iterable[str]) -> None:
    """Raise UsageError if a given setting belongs to an alternative that was not chosen."""
    for leaf in sorted(given):
        wanted = unknown_for(config, leaf)
        if wanted is not None:
            flag = leaf.replace("_", "-")
            way = "leave out one of them" if " without " in wanted else f"use that, or leave out --{flag}"
            raise UsageError(f"--{flag} needs {wanted}; {way}")


def from_dict(tree: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Build a Config from nested dicts, or from a flat dict by names of flags.

    Other settings have their defaults. Some depend on the strategy, the model and `hvfreeze auto`.

    Raises:
        UsageError: a key is unknown, a value has the wrong type or is out of bounds, or a setting belongs to an
            alternative that was not chosen. The message names `source`.
    """
    found, whole = flat(tree, source=source), is_of_run(tree)
    if whole:
        return build(found, given=given_in(tree, found, source=source), source=source)
    given = frozenset(name for name, value in found.items() if value is not None)
    config = build(with_defaults(found), given=given, source=source)
    check_known(config, given)
    return config


def build(found: Mapping[str, Any], *, given: frozenset[str] = frozenset(), source: str = "configuration") -> Config:
    """Return the configuration of settings by name, without settings of other strategies."""
    kinds: dict[str, Any] = {**sections(), "strategy": strategy_of(found)}
    made: dict[str, Any] = {section: {} for section in kinds}
    for leaf, value in found.items():
        kind = kinds[section := leaves()[leaf][0]]
        if leaf in fields_of(kind):
            made[section][leaf] = typed(leaf, value, types_of(kind)[leaf], source=source)
    return Config(**{name: kinds[name](**entries) for name, entries in made.items()}, given=given)


def strategy_of(found: Mapping[str, Any]) -> type[StrategyConfig]:
    """Return the class of the settings of the chosen strategy."""
    name = found.get("strategy", "replicas")
    rule(str(name) in STRATEGIES, "strategy", name, "one of " + ", ".join(STRATEGIES))
    return STRATEGIES[name]


def with_defaults(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the defaults that depend on the strategy, the model and `hvfreeze auto`.

    A learning rate without an optimizer means AdamW in `hvfreeze auto`.
    """
    usual = dict(strategy_of(found).defaults)
    if str(found.get("model")).startswith(HF):
        # A folder of Hugging Face contains the weights.
        usual["weights"] = "DEFAULT"
    if found.get("freeze") == AUTO:
        usual |= AUTO_DEFAULTS
        if found.get("head") == "last":
            # The model's last layer can be fitted, but is not a kernel head.
            usual["head_fit"] = "exact"
        if "lr" in found or "head_lr" in found:
            usual["optimizer"] = "adamw"
        if found.get("optimizer", usual["optimizer"]) == "adamw":
            usual["lr"] = AUTO_RATE
    return {**usual, **found}


def is_of_run(tree: Mapping[str, Any]) -> bool:
    """Return True if a run wrote this configuration, with all sections; otherwise every setting in it was given."""
    return set(sections()) <= set(tree)


def given_in(tree: Mapping[str, Any], found: Mapping[str, Any], *, source: str) -> frozenset[str]:
    """Return the names of the settings that were given to the run that wrote a file.

    An earlier version did not write them: there, settings were given if they differ from the defaults of such a run.
    """
    if "given" in tree:
        given = tree["given"]
        given = [RENAMED.get(name, name) for name in given] if isinstance(given, list) else given
        if not isinstance(given, list) or not set(given) <= leaves().keys():
            raise UsageError(f"{source}: given ({given!r}) must be a list of settings")
        return frozenset(given)
    whole, auto = build(found, source=source), {"freeze": AUTO} if found.get("freeze") == AUTO else {}
    first = {"strategy": found.get("strategy", "replicas"), **auto}
    kind = {name: found[name] for name in ("optimizer", "cache", "head", "head_fit") if name in found}
    plain, before, usual = (
        settings_of(build(with_defaults(tree)).resolved())
        for tree in ({}, first, {"augment": "views:1", **first, **kind})
    )
    usual |= {name: before[name] for name in (*kind, "augment")} | {name: plain[name] for name in first}
    # What follows from a fitted head.
    made = ("freeze", "cut", "epochs") if whole.head.solved and not auto else ()
    usual["blocks"] = usual["blocks"] if found.get("blocks") != "auto" else "auto"
    given = {name for name, value in found.items() if name not in made and value != usual.get(name)}
    return frozenset(name for name in given if unknown_for(whole, name) is None)


def asked_for(tree: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the settings of a configuration file by name; of the config.yaml of a run, only the given ones.

    They make the same run, and settings that follow from a changed one are recomputed. The data and the model stay,
    even if the strategy has other defaults for them.
    """
    found = flat(tree, source=source)
    if not is_of_run(tree):
        return found
    given = given_in(tree, found, source=source) | {"data", "model"}
    return {name: value for name, value in found.items() if name in given}


def applying(settings: Mapping[str, Any], *, source: str = "configuration") -> dict[str, Any]:
    """Return settings without those of alternatives that are not chosen.

    Raises:
        UsageError: as `from_dict`.
    """
    found = flat(settings, source=source)
    config = build(with_defaults(found), source=source)
    return {name: value for name, value in found.items() if unknown_for(config, name) is None}


def defaults_of(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the defaults of all settings, for a file that lacks some of them."""
    strategy = STRATEGIES.get(str(tree.get("strategy", {}).get("strategy")), STRATEGIES["replicas"])
    optimizer = tree.get("optimizer", {}).get("optimizer")
    named = {"optimizer": optimizer} if optimizer in ("adamw", "lars", AUTO) else {}
    usual = {name: dataclasses.asdict(kind()) for name, kind in sections().items() if kind is not StrategyConfig}
    return {
        **usual,
        "strategy": dataclasses.asdict(strategy()),
        "optimizer": dataclasses.asdict(OptimizerConfig(**named)),
    }


def flat(tree: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the settings of a configuration by name, with unchecked values.

    Raises:
        UsageError: a section or key is unknown, in the wrong section, or given twice.
    """
    known = leaves()
    found: dict[str, Any] = {}
    for key, value in convert(tree).items():
        name = str(key).replace("-", "_")
        section = name if isinstance(value, Mapping) else None
        if section is not None and section not in sections():
            raise UsageError(f"{source}: unknown section '{key}'{did_you_mean(section, sections())}")
        for leaf, entry in value.items() if section is not None else [(name, value)]:
            leaf = str(leaf).replace("-", "_")
            if leaf not in known or section not in (None, known[leaf][0]):
                raise UsageError(f"{source}: unknown key '{leaf}'{did_you_mean(leaf, known, named_by(leaf))}")
            if leaf in found:
                raise UsageError(f"{source}: '{leaf}' is given twice; leave one")
            found[leaf] = entry
    return found


def named_by(words: str) -> list[str]:
    """Return the settings whose help starts with these words, as lr's does with learning_rate or learning-rate."""
    plain = re.sub("[-_]", " ", words)
    return [name for name, (_, leaf, _) in leaves().items() if leaf.metadata["help"].startswith(plain)]


RENAMED = {"mirror": "flips", "tensorboard": "track"}
"""Names of settings in earlier versions, and their present names."""
WAS_TRUE = {"track": {True: "tensorboard", False: "none"}}
"""Present values of settings that were booleans in earlier versions."""


def convert(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file of any version under their present names, in their present sections.

    Files of runs have null for some defaults; in earlier versions they have the settings of all strategies.
    """
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    if is_of_run(tree):
        given = {name: value for name, value in found.items() if name != "given"}
        found = {
            name: {leaf: entry for leaf, entry in value.items() if entry is not None} if type(value) is dict else value
            for name, value in given.items()
        }
    for section in [found, *(value for value in found.values() if isinstance(value, dict))]:
        if re.fullmatch(r"[0-9]+s", every := str(section.get("checkpoint_every"))):
            # In earlier versions the suffix of a number of steps.
            section["checkpoint_every"] = f"{every}teps"
        for leaf in RENAMED.keys() & section.keys():
            name, value = RENAMED[leaf], section.pop(leaf)
            home = found if section is found else found.setdefault(leaves()[name][0], {})
            home.setdefault(name, WAS_TRUE.get(name, {}).get(value, value))
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file of plain values.

    Raises:
        UsageError: the file cannot be read, is not plain YAML, or is not a mapping.
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
