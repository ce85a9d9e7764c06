"""The flags of `hvfreeze train` and `hvfreeze auto`, with the names and meanings of the settings."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvfreeze.config.data import DATA_SETS, TEXT, is_table
from hvfreeze.config.freeze import AUTO, BY_HAND
from hvfreeze.config.model import TINY_LM
from hvfreeze.config.registry import STRATEGIES
from hvfreeze.config.run import parse_cadence
from hvfreeze.config.tree import (
    RENAMED,
    Config,
    applying,
    asked_for,
    build,
    check_known,
    fields_of,
    from_dict,
    is_of_run,
    leaves,
    named_by,
    read_yaml,
    sections,
    strategy_of,
    unknown_for,
    with_defaults,
)
from hvfreeze.errors import EXIT_CODES, UsageError
from hvfreeze.user_code import HF, is_named_code
from hvfreeze.wording import did_you_mean

EXAMPLES = """examples:
  hvfreeze train
      one process, ResNet-18 on scikit-learn's digits: no network, no Horovod
  horovodrun -np 2 -H localhost:2 hvfreeze train --freeze coherence
      two ranks that vote which blocks to freeze
  horovodrun -np 4 -H node0:1,node1:1,node2:1,node3:1 hvfreeze train --data cifar10 --weights DEFAULT \\
      --image-size 64 --lr 0.02 --schedule cosine --freeze coherence --augment views:2 --cache auto
      four nodes; once blocks are frozen, epochs read their output from the cache
  hvfreeze train --data imagefolder --data-dir photos --image-size 128 --weights DEFAULT --freeze static --cut 3
      your own images in photos/train/<class>/ and photos/test/<class>/, the first three blocks frozen
  mpirun -np 3 --bind-to none hvfreeze train --strategy shared-trunk --data imagefolder --data-dir photos \\
      --image-size 128 --weights DEFAULT --tasks labels.csv --augment none --cache on
      a model for each column of labels.csv, on one frozen trunk; its gradients never travel
  mpirun -np 4 --bind-to none hvfreeze train --strategy grid --model resnet110 --parts 2 --micro-batches 8
      one model cut into two parts, in two replicas
  hvfreeze train --config runs/good/config.yaml --lr 0.01 --run-dir runs/better
      another run's configuration with one change
  hvfreeze train --run-dir runs/good --resume
      continue a run that stopped
"""


def add_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the flags of a command that makes a run. The help shows the flags of the choices in `words`."""
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28)
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file of settings; flags override it")
    if parser.prog.endswith(AUTO):
        add_auto(parser)
    else:
        add_train(parser, words)


def add_train(train: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add a flag for each setting."""
    train.usage = f"{train.prog} [FLAG...]"
    more = "flags of other choices: --strategy NAME --help, --freeze CRITERION --help, --cache on --help and so on\n\n"
    train.epilog = f"{more}{EXAMPLES}\n{EXIT_CODES}"
    train.description = "Fine-tune a model; front blocks freeze by vote of all ranks."
    chosen = choices_in(words)
    shown = build(with_defaults(chosen))
    train.add_argument("--help-all", action=HelpAll, help="show the flags of every choice")
    for part in dataclasses.fields(Config):
        if part.name in sections():
            group = train.add_argument_group(part.metadata["title"])
            for name, (section, leaf, kind) in leaves().items():
                if section == part.name:
                    own = fields_of(strategy_of(chosen)).get(name, leaf) if name != "strategy" else leaf
                    action = add_flag(group, own, kind, shown)
                    wanted = unknown_for(shown, name)
                    if wanted is not None:
                        action.whole_help, action.help = f"{wanted}: {action.help}", argparse.SUPPRESS


CHOICES = ("strategy", "freeze", "shadow", "cache", "head", "head_fit", "optimizer", "data", "augment", "cut_by")
"""Settings that determine which other settings there are."""
ASSUMED = {"augment": "views:1", "image_size": 32, "validation_fraction": 0.1, "resume": True, "run_dir": "runs/a"}
"""Settings with which the help shows the flags that need them, as most runs may have them."""
IMPLIED: dict[str, dict[str, Any]] = {
    "static": {"cut": 1},
    "kernel": {"head": "multi-level"},
    "given": {"cut_at": "1"},
    TEXT: {"model": TINY_LM, "augment": "none", "image_size": None},
}
"""Settings that a choice needs to be valid."""


def choices_in(words: Sequence[str]) -> dict[str, Any]:
    """Return the valid choices on a command line, for its help."""
    chosen: dict[str, Any] = dict(ASSUMED)
    for name in CHOICES:
        for place, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if flag == flag_of(name):
                value = value if equals else next(iter(words[place + 1 :]), "")
                changed = {**chosen, **IMPLIED.get(value, {}), name: value}
                with suppress(UsageError):
                    build(with_defaults(changed))
                    chosen = changed
    return chosen


AUTO_EXAMPLES = """examples:
  hvfreeze auto digits
  horovodrun -np 4 -H node0:1,node1:1,node2:1,node3:1 hvfreeze auto photos --weights DEFAULT
"""
IMAGES, BUILT_IN = "imagefolder", tuple(name for name in DATA_SETS if name not in ("imagefolder", TEXT))
AUTO_TEXTS = {
    "epochs": "most work of the run, in epochs of full fine-tuning",
    "batch_size": "samples per rank and backward pass; default: chosen",
}
"""Texts of the help that differ in `hvfreeze auto`."""
NOT_OF_AUTO = ("data", "context", "freeze")
"""Settings that `hvfreeze auto` chooses, in addition to the settings of strategies and of `BY_HAND`."""


def add_auto(auto: argparse.ArgumentParser) -> None:
    """Add the flags of `hvfreeze auto`. Its help shows a few of them."""
    auto.usage = f"{auto.prog} DATA [FLAG...]"
    auto.epilog = AUTO_EXAMPLES
    auto.description = "Fine-tune while a held-out tenth improves; keep the better of network and head."
    shown = build(with_defaults({"freeze": AUTO}))
    auto.add_argument(
        "source",
        nargs="?",
        metavar="DATA",
        help=f"folder with train/CLASS/, test/CLASS/; table (.csv); {', '.join(BUILT_IN)}",
    )
    auto.add_argument("--help-all", action=HelpAll, help="show every flag, with its whole text")
    for name in settings_of_auto():
        _, leaf, kind = leaves()[name]
        action = add_flag(auto, leaf, kind, shown)
        usual, brief = default_in(shown, leaf), leaf.metadata["brief"]
        action.whole_help = with_default(AUTO_TEXTS[name], usual) if name in AUTO_TEXTS else action.help
        action.help = with_default(brief, usual) if brief else argparse.SUPPRESS


def settings_of_auto() -> tuple[str, ...]:
    """Return the names of the settings of `hvfreeze auto`."""
    found = {name: leaf for name, (section, leaf, _) in leaves().items() if section != "strategy"}
    return tuple(name for name, leaf in found.items() if name not in NOT_OF_AUTO and BY_HAND not in leaf.metadata["of"])


class HelpAll(argparse.Action):
    """An action that prints the help of all flags of a command, with their whole texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        """Print the help and exit."""
        for action in parser._actions:
            action.help = getattr(action, "whole_help", action.help)
        parser.print_help()
        parser.exit()


def first_line(kind: type) -> str:
    """Return the first line of a class's docstring, as part of a sentence."""
    text = (kind.__doc__ or "").partition(chr(10))[0].removesuffix(".")
    return text[:1].lower() + text[1:]


def add_flag(group: Any, leaf: dataclasses.Field[Any], kind: Any, shown: Config) -> Any:
    """Add the flag of a setting with its text and its default in the configuration `shown`; return the action."""
    flag, text = flag_of(leaf.name), leaf.metadata["help"].replace("%", "%%")
    if bool in (typing.get_args(kind) or (kind,)):
        return group.add_argument(flag, action="store_true", help=text)
    if leaf.name == "strategy":
        text += "; ".join(f" {name} ({first_line(kind)})" for name, kind in STRATEGIES.items())
    text = with_default(text, default_in(shown, leaf))
    return group.add_argument(flag, metavar=leaf.metadata["metavar"], type=number_or_text(kind), help=text)


def default_in(shown: Config, leaf: dataclasses.Field[Any]) -> Any:
    """Return the default of a setting for the help, in the configuration `shown`; None if there is none."""
    usual = getattr(getattr(shown, leaves()[leaf.name][0]), leaf.name, None)
    return leaf.default if leaf.name in ASSUMED else None if usual is False else usual


def with_default(text: str, usual: Any) -> str:
    """Return a text of the help with the default, unless the text has it."""
    return text if usual is None or "default: " in text or text.endswith("]") else f"{text} [{usual}]"


def flag_of(leaf: str) -> str:
    """Return the flag of a setting."""
    return "--" + leaf.replace("_", "-")


def number_or_text(kind: Any) -> type:
    """Return the type to which the text of a flag is converted."""
    options = typing.get_args(kind) or (kind,)
    return next(option for option in (int, float, str) if option in options)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings on a command line by name.

    Raises:
        UsageError: the data of `hvfreeze auto` are given twice.
    """
    flags = {name: value for name, value in vars(options).items() if name in leaves()}
    # Files of earlier versions have 200s for 200 steps; on a command line it would read as seconds.
    parse_cadence(flags.get("checkpoint_every", "auto"))
    if options.command == AUTO:
        flags |= data_of(options.source, flags.get("data_dir")) if "source" in options else {}
        flags["freeze"] = AUTO
    return flags


def data_of(source: str, data_dir: str | None) -> dict[str, str]:
    """Return the settings for DATA of `hvfreeze auto`: a built-in data set, code, hf:PATH, a table, or a folder.

    Raises:
        UsageError: it is the name of a data set and of a folder, it does not exist, or a folder is given twice.
    """
    if source in BUILT_IN:
        if os.path.isdir(source):
            raise UsageError(
                f"DATA ({source}) is a built-in data set and a folder here: type ./{source} for the folder, or start "
                "in another directory for the data set"
            )
        return {"data": source}
    if is_named_code(source) or source.startswith(HF) or (is_table(source) and not os.path.isdir(source)):
        return {"data": source}
    if data_dir is not None:
        raise UsageError(
            f"--data-dir ({data_dir}) must be left out with a folder as DATA ({source}); type hvfreeze auto {data_dir}"
        )
    if os.sep not in source and not os.path.exists(source) and (hint := did_you_mean(source, BUILT_IN)):
        raise UsageError(f"DATA ({source}) does not exist{hint}")
    if not source:
        raise UsageError("DATA is empty: name a folder of images; a variable of the shell may not be set")
    return {"data": IMAGES, "data_dir": source}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the command and its arguments for settings by name."""
    rest, words = dict(settings), ["train"]
    if rest.get("freeze") == AUTO:
        del rest["freeze"]
        data = str(rest.pop("data", DATA_SETS[0]))
        words = [AUTO, str(rest.pop("data_dir", "DIR")) if data == IMAGES else data]
    for name, value in rest.items():
        words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return words


def configuration(options: argparse.Namespace) -> Config:
    """Return the configuration for the options of a command.

    Raises:
        UsageError: the file or a value is invalid.
    """
    flags, path = given(options), getattr(options, "config", None)
    if path is None:
        source, found = "command line", of_run_to_resume(flags)
    else:
        source, tree = f"--config ({path})", read_yaml(path)
        found = asked_for(tree, source=source)
        if is_of_run(tree) and not flags.get("resume"):
            # This is another run, which needs a directory of its own.
            found.pop("run_dir", None)
    settings = {**found, **flags}
    is_of_earlier_run = bool(found) and (path is None or is_of_run(tree))
    if is_of_earlier_run:
        # Settings of the earlier run may belong to a choice that a flag has changed.
        settings = applying(settings, source=source) | flags
    if options.command != AUTO and settings.get("freeze") == AUTO:
        words = [AUTO, *(["--config", str(path)] if path else []), *words_of(flags)[1:]]
        words = words_of(flags) if flags.get("freeze") == AUTO else words
        raise UsageError(f"--freeze auto is a separate command; type: hvfreeze {shlex.join(words)}")
    if options.command == AUTO and not {"data", "data_dir"} & settings.keys():
        why = f"--run-dir ({flags.get('run_dir')}) holds no run to resume, and " if flags.get("resume") else ""
        raise UsageError(
            f"{why}DATA is missing: type hvfreeze auto DIR with a folder of images, or hvfreeze auto digits"
        )
    if is_of_earlier_run and flags.get("resume"):
        # The run may have settings without effect, which an earlier version accepted.
        config = build(with_defaults({**found, **flags}), given=frozenset(settings), source=source)
        check_known(config, flags)
        return config
    return from_dict(settings, source=source)


OF_A_START = ("quiet", "json")
"""Settings for the output of one start, which a resumed run does not keep."""


def of_run_to_resume(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run to resume, or nothing if there is none.

    A config.yaml that cannot be read is reported later, with the run's other files.
    """
    if not (flags.get("resume") and flags.get("run_dir")):
        return {}
    path = Path(flags["run_dir"]) / "config.yaml"
    with suppress(UsageError):
        tree = read_yaml(path) if os.path.isfile(path) else {}
        begun = asked_for(tree, source=str(path)) if is_of_run(tree) else {}
        return {name: value for name, value in begun.items() if name not in OF_A_START}
    return {}


def hint_at(word: str, command: str) -> str:
    """Return a hint for an argument that a command does not know, or the empty string."""
    settings = list(leaves()) if command == "train" else settings_of_auto()
    known, others = map(flag_of, settings), [flag_of(name) for name in named_by(word[2:]) if name in settings]
    renamed = {flag_of(before): flag_of(leaf) for before, leaf in RENAMED.items()}
    if word in renamed:
        return f"; it is {renamed[word]} now"
    if word.removeprefix("--").replace("-", "_") in leaves():
        return "; it is a flag of hvfreeze train"
    return did_you_mean(word, known, others)
