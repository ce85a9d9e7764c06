"""The train command's flags, with the names and meanings of the configuration's leaves."""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hvfreeze.config.tree import Config, asked_for, from_dict, is_of_run, leaves, read_yaml
from hvfreeze.errors import UsageError

EXAMPLES = """examples:
  hvfreeze train
      one process, ResNet-18 on scikit-learn's digits: no network, no Horovod
  horovodrun -np 2 -H localhost:2 hvfreeze train --freeze coherence
      two ranks that vote which blocks to freeze
  horovodrun -np 4 -H node0:1,node1:1,node2:1,node3:1 hvfreeze train --data cifar10 --weights DEFAULT \\
      --image-size 64 --lr 0.02 --schedule cosine --freeze coherence --augment views:2 --cache auto
      four nodes; once blocks are frozen, epochs read their output from the cache
  mpirun -np 4 --bind-to none hvfreeze train --data imagefolder --data-dir photos --weights DEFAULT \\
      --image-size 128 --freeze auto --cache auto
      no learning rate to choose: a head is solved on every block's features, and blocks are tuned where a trial shows
      that it pays; --epochs 1 solves the head alone
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
      go on where a run stopped
"""
EXIT_CODES = """exit codes:
  0 done   2 usage   3 data, cache or checkpoint refused   4 ranks diverged   5 numbers not finite   6 stall
  75 preempted by SIGUSR1, or a lone process by SIGTERM (go on with --resume)   130 interrupted (Ctrl-C)
  143 one of several ended by SIGTERM
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the program's own."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message and where to read more."""
        raise UsageError(f"{message}; '{self.prog} --help' explains")


def add_train(commands: Any) -> None:
    """Add the train command: a flag for each leaf of the configuration."""
    train = commands.add_parser(
        "train",
        help="fine-tune a model, alone or as one rank of a job",
        description="Fine-tune a model; front blocks freeze by vote of all ranks.",
        epilog=EXAMPLES + "\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    train.add_argument("--config", metavar="FILE", type=Path, help="YAML file of the same names; flags override it")
    known = leaves()
    for part in dataclasses.fields(Config):
        group = train.add_argument_group(part.metadata["title"])
        for section, leaf, kind in known.values():
            if section == part.name:
                add_flag(group, leaf, kind)


def add_flag(group: Any, leaf: dataclasses.Field[Any], kind: Any) -> None:
    """Add the flag of one leaf, explained by the text that stands where the leaf is declared."""
    flag, text = flag_of(leaf.name), leaf.metadata["help"].replace("%", "%%")
    if bool in (typing.get_args(kind) or (kind,)):
        group.add_argument(flag, action="store_true", help=text)
        return
    auto = leaf.metadata["auto"]
    defaults = [] if leaf.default is None else [str(leaf.default)]
    defaults += [] if auto is None else [f"with --freeze auto: {auto}"]
    defaults += [f"with --strategy {name}: {value}" for name, value in leaf.metadata["by_strategy"].items()]
    shown = f"{text} [{'; '.join(defaults)}]" if defaults else text
    group.add_argument(flag, metavar=leaf.metadata["metavar"], type=number_or_text(kind), help=shown)


def flag_of(leaf: str) -> str:
    """Return the flag of a leaf."""
    return "--" + leaf.replace("_", "-")


def number_or_text(kind: Any) -> type:
    """Return the type that a flag's text is converted to."""
    options = typing.get_args(kind) or (kind,)
    return next(option for option in (int, float, str) if option in options)


def given(options: argparse.Namespace) -> frozenset[str]:
    """Return the settings that stand on the train command's line, by flag with underscores."""
    return frozenset(vars(options)) & frozenset(leaves())


def configuration(options: argparse.Namespace) -> Config:
    """Return the configuration that the train command's options ask for.

    Raises:
        UsageError: the file or a value is not acceptable.
    """
    flags = {name: value for name, value in vars(options).items() if name in leaves()}
    path: Path | None = getattr(options, "config", None)
    if path is None:
        return from_dict({**of_run_to_resume(flags), **flags}, source="command line")
    source, tree = f"--config ({path})", read_yaml(path)
    found = asked_for(tree, source=source)
    if is_of_run(tree) and not flags.get("resume"):
        # Its directory holds that run; this is another one.
        found.pop("run_dir", None)
    return from_dict({**found, **flags}, source=source)


OF_A_START = ("quiet", "json")
"""Leaves that say how a start speaks to whoever made it."""


def of_run_to_resume(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that is to be resumed, which flags change; nothing where there is none.

    Nor of one whose config.yaml cannot be read: what is wrong with it is told where the run is looked at.
    """
    if not (flags.get("resume") and flags.get("run_dir")):
        return {}
    path = Path(flags["run_dir"]) / "config.yaml"
    with suppress(UsageError):
        tree = read_yaml(path) if os.path.isfile(path) else {}
        begun = asked_for(tree, source=str(path)) if is_of_run(tree) else {}
        return {name: value for name, value in begun.items() if name not in OF_A_START}
    return {}
