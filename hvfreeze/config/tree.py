"""A configuration: the tree of all sections, as nested dicts and as a YAML file of plain values.

It comes from a YAML file (`--config`), from command line flags that override it, or from Python. The leaves of the tree
have unique names.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hvfreeze.config.rules import rule, typed, types_of
from hvfreeze.config.sections import (
    AUTO,
    LEARNING_RATES,
    TEXT,
    TEXT_STRATEGIES,
    TINY_LM,
    CacheConfig,
    DataConfig,
    FreezeConfig,
    HeadConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
)
from hvfreeze.errors import UsageError

MOST_BYTES = 2**20
DEEPEST = 16
BOOLEAN, INTEGER = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int"


class PlainLoader(yaml.SafeLoader):
    """Reads values without aliases, which can stand for exponentially many, and of few levels, which are recursion.

    A key that comes twice is refused, where YAML's readers let the last one win. As on a command line `on` and `off`
    are text, and a number that begins with 0 is decimal; YAML 1.1 has them for booleans and octal.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a value, or refuse it where it is an alias or lies too deep."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*NAME) is not read; write the value out")
        if self._depth >= DEEPEST:
            raise yaml.YAMLError(f"values are nested deeper than {DEEPEST} levels")
        self._depth += 1
        try:
            node: yaml.Node | None = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, count in keys.most_common(1):
                if count > 1:
                    raise yaml.YAMLError(f"the key {key} is there twice in one place; leave one")
        return node


def construct_integer(loader: PlainLoader, node: yaml.ScalarNode) -> int:
    """Return the integer that stands in a file."""
    if re.fullmatch(r"[-+]?0[0-9]+", text := str(loader.construct_scalar(node))):
        return int(text)
    return loader.construct_yaml_int(node)


PlainLoader.add_constructor(INTEGER, construct_integer)
PlainLoader.yaml_implicit_resolvers = {
    first: [entry for entry in known if first not in ("o", "O") or entry[0] != BOOLEAN]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_plain_yaml(text: bytes, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in UTF-8 YAML `text`, of `most_bytes` at most; None for an empty one.

    Raises:
        ValueError: it is something else; says in one line what.
    """
    if len(text) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes} bytes")
    try:
        return yaml.load(text.decode("utf-8"), PlainLoader)
    except Exception as error:  # forged values make the constructors raise anything: KeyError, IndexError, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            reason if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {reason}"
        ) from error


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
        for name, section in types_of(Config).items():
            found = getattr(self, name)
            if not isinstance(found, section):
                raise UsageError(
                    f"Config: {name} ({found!r}) must be of type {section.__name__}; hvfreeze.config.tree.from_dict "
                    "makes a Config of flags by name"
                )
        data, cache, head, freeze = self.data, self.cache, self.head, self.freeze
        if cache.cache == "on" and not freeze.auto:
            wanted = "used with --augment none or views:K"
            rule(data.cacheable(), "cache", "on", wanted, "fresh draws never come again")
        self._check_text()
        held_out = data.validation_fraction > 0
        why = "what is chosen must be chosen on held-out samples, never on the test set"
        with_it = "given together with --validation-fraction F, such as 0.1"
        rule(held_out or self.run.keep == "last", "keep", self.run.keep, with_it, why)
        rule(held_out or self.run.early_stop is None, "early-stop", self.run.early_stop, with_it, why)
        heads, many = self.optimizer.head_rates() or [], self.strategy.strategy == "shared-trunk"
        rule(many or len(heads) < 2, "head-lr", self.optimizer.head_lr, "one number: there is one head")
        rule(not heads or self.strategy.tasks is None, "head-lr", self.optimizer.head_lr, "left out with --tasks")
        compares = head.head_fit == "kernel"
        rule(head.head != "last" or not compares, "head", head.head, "multi-level with --head-fit kernel")
        reads_both = data.flips != "mean" or head.head == "multi-level"
        rule(reads_both, "flips", data.flips, "auto, on or off unless --head is multi-level, as in hvfreeze auto")
        named = freeze.auto or self.optimizer.optimizer != AUTO
        rule(named, "optimizer", AUTO, "sgd, adamw or lars unless --freeze is auto")
        if freeze.auto:
            self._check_auto()
        elif head.solved:
            self._check_solved()

    def _check_solved(self) -> None:
        solved, settings, strategy = "with --head-fit exact or kernel", self.optimizer, self.strategy.strategy
        why = "it fits fixed views of each sample"
        rule(self.data.cacheable(), "augment", self.data.augment, f"none or views:K {solved}", why)
        freeze, alone = self.freeze, f"left out {solved}, which freezes every block but the head"
        rule((freeze.freeze, freeze.cut) in (("none", None), SOLVED), "freeze", freeze.freeze, alone)
        rule(settings.accumulate == 1, "accumulate", settings.accumulate, f"1 {solved}")
        rule(not settings.mixup, "mixup", settings.mixup, f"left out {solved}, which fits every sample")
        rule(strategy == "replicas", "strategy", strategy, f"replicas {solved}")

    def _check_text(self) -> None:
        model, text = self.model.model, self.data.data == TEXT
        rule(text or model != TINY_LM, "model", model, f"given together with --data {TEXT}", "it reads characters")
        fits = not text or model == TINY_LM or (":" in model and not model.startswith("timm:"))
        rule(fits, "model", model, f"{TINY_LM} or package:function with --data {TEXT}")
        strategy, known = self.strategy.strategy, " or ".join(TEXT_STRATEGIES)
        rule(not text or strategy in TEXT_STRATEGIES, "strategy", strategy, f"{known} with --data {TEXT}")
        rule(not (text and self.optimizer.mixup), "mixup", self.optimizer.mixup, f"left out with --data {TEXT}")
        rule(not text or self.head.head == "last", "head", self.head.head, f"last with --data {TEXT}")
        fit = self.head.head_fit
        rule(not (text and self.head.solved), "head-fit", fit, f"sgd with --data {TEXT}, and --freeze not auto")

    def _check_auto(self) -> None:
        fit, strategy, keep = self.head.head_fit, self.strategy.strategy, self.run.keep
        rule(self.head.solved, "head-fit", fit, "exact or kernel in hvfreeze auto, which solves its head")
        rule(strategy == "replicas", "strategy", strategy, "replicas in hvfreeze auto")
        rule(keep == "last", "keep", keep, "last in hvfreeze auto, which keeps what is best itself")
        settings = self.optimizer
        if settings.optimizer == AUTO:
            usual = settings.lr == LEARNING_RATES[AUTO]
            rule(usual, "lr", settings.lr, "left out with --optimizer auto", "it is one optimizer's: name that")
            rule(settings.head_lr is None, "head-lr", settings.head_lr, "left out with --optimizer auto", "name one")
        stop = self.run.early_stop
        rule(stop is None, "early-stop", stop, "left out in hvfreeze auto, whose stages last as long as was planned")

    def resolved(self) -> Config:
        """Return this configuration with what follows from others of its settings.

        --blocks auto is residual for the grid and for local critics, which share blocks out evenly, else stage. A
        solved head is one epoch, and the head alone free; in hvfreeze auto that holds for some of the run's stages,
        not for the run.
        """
        if self.model.blocks == "auto":
            fine = self.strategy.strategy in ("grid", "local-critics")
            model = dataclasses.replace(self.model, blocks="residual" if fine else "stage")
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
        """The seed of subset, shards, order and views."""
        return self.run.seed if self.data.data_seed is None else self.data.data_seed


@cache
def leaves() -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Return for each flag (with underscores) its section, its dataclass field and its type."""
    found: dict[str, tuple[str, dataclasses.Field[Any], Any]] = {}
    for name, cls in types_of(Config).items():
        types = types_of(cls)
        for leaf in dataclasses.fields(cls):
            found[leaf.name] = (name, leaf, types[leaf.name])
    return found


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the tree as nested plain dicts, as written to config.yaml."""
    return dataclasses.asdict(config)


def from_dict(tree: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Build a Config from nested dicts; a flat dict of flag names is accepted too.

    What is not given has its default, with some values of --freeze and --strategy the one for that.

    Raises:
        UsageError: an unknown key, a wrong type or a value out of its range; the message names `source`.
    """
    known = leaves()
    types = types_of(Config)
    sections: dict[str, dict[str, Any]] = {section: {} for section in types}
    given = flat(tree, source=source)
    given = strategy_defaults(given) | given
    if given.get("freeze") == AUTO:
        given = auto_defaults(given) | given
    for leaf, value in given.items():
        section, _, kind = known[leaf]
        sections[section][leaf] = typed(leaf, value, kind, source=source)
    config = Config(**{section: types[section](**entries) for section, entries in sections.items()})
    cut, freeze = config.freeze.cut, config.freeze.freeze
    rule(
        cut is None or freeze in ("static", AUTO), "cut", cut, "left out unless --freeze is static, or in hvfreeze auto"
    )
    return config


def auto_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what leaves are in hvfreeze auto where nothing is given.

    The rate is AdamW's, and left to others; who gives a rate and no optimizer has AdamW.
    """
    known = {name: leaf.metadata["auto"] for name, (_, leaf, _) in leaves().items()}
    if given.get("head") == "last":
        # The model's own last layer can be solved, but not compare rows.
        known["head_fit"] = "exact"
    if "lr" in given or "head_lr" in given:
        known["optimizer"] = "adamw"
    others = () if given.get("optimizer") in (None, AUTO, "adamw") else ("lr",)
    return {name: value for name, value in known.items() if value is not None and name not in others}


def strategy_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what leaves are with the strategy that is given, where that has defaults of its own."""
    strategy = str(given.get("strategy"))
    by_leaf = {name: leaf.metadata["by_strategy"] for name, (_, leaf, _) in leaves().items()}
    return {name: defaults[strategy] for name, defaults in by_leaf.items() if strategy in defaults}


def kind_of(config: Config) -> dict[str, str]:
    """Return the settings (by flag with underscores) on which defaults of others depend."""
    kind = {"strategy": config.strategy.strategy, "optimizer": config.optimizer.optimizer}
    return kind | ({"freeze": AUTO, "head": config.head.head} if config.freeze.auto else {})


def differing(config: Config) -> frozenset[str]:
    """Return the flags (with underscores) whose values are not the defaults of a run of this kind."""
    auto, solved, kind = config.freeze.auto, config.head.solved, kind_of(config)
    usual, mine = (flat(to_dict(each), source="configuration") for each in (from_dict(kind), config))
    # What `resolved` makes of settings was not asked for, and stands in every config.yaml.
    made: dict[str, Any] = {"freeze": SOLVED[0], "cut": SOLVED[1], "epochs": 1} if solved and not auto else {}
    made["blocks"] = from_dict(kind).resolved().model.blocks
    return frozenset(name for name, value in usual.items() if mine[name] not in (value, made.get(name, value)))


def is_of_run(tree: Mapping[str, Any]) -> bool:
    """Tell whether a configuration file is a run's: they write every section, and in others every leaf is meant."""
    return set(types_of(Config)) <= set(tree)


def asked_for(tree: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the leaves of a configuration file by name, of a run's config.yaml without those that follow from others.

    They make the same run, and where one of them is changed, what follows from it is worked out anew.

    Raises:
        UsageError: an unknown key, or one in another section than its own, or twice.
    """
    found = flat(tree, source=source)
    if not is_of_run(tree):
        return found
    with suppress(UsageError):
        whole = from_dict(found, source=source)
        kind = kind_of(whole)
        # What a run learns stays, also where its strategy has data and a model of its own: runs of several strategies
        # are compared.
        usual = found.keys() - differing(whole) - kind.keys() - {"data", "model"}
        for names in (usual, *({name} for name in kind)):
            fewer = {name: value for name, value in found.items() if name not in names}
            with suppress(UsageError):
                found = fewer if from_dict(fewer, source=source).resolved() == whole.resolved() else found
    return found


def flat(tree: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the leaves of a configuration by name, their values as they are.

    Raises:
        UsageError: an unknown section or key, a key in another section than its own, or one that is given twice.
    """
    known = leaves()
    sections = types_of(Config)
    found: dict[str, Any] = {}
    for key, value in convert(tree).items():
        name = str(key).replace("-", "_")
        section = name if isinstance(value, Mapping) else None
        if section is not None and section not in sections:
            raise UsageError(f"{source}: unknown section '{key}'{did_you_mean(section, sections)}")
        for leaf, entry in value.items() if section is not None else [(name, value)]:
            leaf = str(leaf).replace("-", "_")
            if leaf not in known or section not in (None, known[leaf][0]):
                raise UsageError(f"{source}: unknown key '{leaf}'{did_you_mean(leaf, known)}")
            if leaf in found:
                raise UsageError(f"{source}: '{leaf}' is given twice; leave one")
            found[leaf] = entry
    return found


RENAMED = {"mirror": "flips"}
"""Settings of earlier versions by what they are called now."""


def convert(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier version's file under their present names, in their present sections."""
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for section in [found, *(value for value in found.values() if isinstance(value, dict))]:
        for leaf in RENAMED.keys() & section.keys():
            name, value = RENAMED[leaf], section.pop(leaf)
            home = found if section is found else found.setdefault(leaves()[name][0], {})
            home.setdefault(name, value)
    return found


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
