"""The command line: flags with the same names and meanings as the leaves of the configuration."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvfreeze.config.sections import Config
from hvfreeze.config.tree import did_you_mean, flat, from_dict, leaves, read_yaml
from hvfreeze.errors import UsageError

COMMANDS = ("train", "report", "doctor", "cache")

DESCRIPTION = "Fine-tune vision models on CPU nodes: ranks vote which front layers to freeze, and cache their output."

EXAMPLES = """examples:
  hvfreeze train
      one process, ResNet-18 on scikit-learn's digits: no network, no Horovod
  horovodrun -np 2 -H localhost:2 hvfreeze train --freeze gradient-norm
      two ranks that vote blocks frozen
  horovodrun -np 4 -H node0:1,node1:1,node2:1,node3:1 hvfreeze train --data cifar10 --weights DEFAULT \\
      --image-size 64 --lr 0.02 --schedule cosine --freeze percentile --augment views:4 --cache auto
      four nodes; later epochs read the frozen blocks' output from the cache
  hvfreeze train --data imagefolder --data-dir photos --image-size 128 --freeze static --cut 3
      your own images in photos/train/<class>/ and photos/test/<class>/, the first three blocks frozen
  hvfreeze train --config runs/good/config.yaml --lr 0.01 --run-dir runs/better
      another run's configuration with one change
  hvfreeze train --run-dir runs/good --config runs/good/config.yaml --resume
      go on where a run stopped

exit codes: 0 done, 2 usage, 3 data, cache or checkpoint refused, 4 ranks diverged, 5 numbers not finite, 6 stall,
75 preempted (go on with --resume)
"""

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "data": {
        "data": ("NAME", "digits, cifar10, cifar100 or imagefolder"),
        "data_dir": ("DIR", "where the data lies; default $HVFREEZE_DATA or a cache directory"),
        "train_samples": ("N", "train on a stratified subset of N samples"),
        "validation_fraction": ("F", "hold out this part of the training set, and evaluate on it alone"),
        "image_size": ("PIXELS", "resize images; default: the data's own size"),
        "data_seed": ("SEED", "seed of subset, shards, order and views; default: --seed"),
        "shuffle": ("HOW", "shard (fixed shards, shuffled inside) or global (dealt out anew each epoch)"),
        "partition": ("HOW", "iid, or dirichlet:A for label skew between ranks"),
        "shard_sizes": ("HOW", "equal, or one relative size per rank, as in 3,1,1,1"),
        "augment": ("HOW", "fresh (new draws every epoch), none, or views:K (K fixed views of each sample)"),
    },
    "model": {
        "model": ("NAME", "a torchvision classification model"),
        "blocks": ("HOW", "where it may be cut: stage, residual, paper, or NAME,NAME,..."),
        "weights": ("FILE", "none, DEFAULT (torchvision's, downloaded), or a state_dict's file"),
    },
    "optimizer": {
        "epochs": ("N", "passes over the shard"),
        "batch_size": ("N", "samples per rank and step"),
        "lr": ("LR", "learning rate, used as given for any number of ranks"),
        "momentum": ("M", "SGD momentum"),
        "weight_decay": ("WD", "SGD weight decay"),
        "schedule": ("NAME", "constant, step (a tenth at 50 %% and 75 %%) or cosine"),
        "lr_warmup": ("STEPS", "steps over which the learning rate rises"),
        "compression": ("HOW", "of gradients on the wire: none or fp16"),
        "precision": ("HOW", "float32, or bfloat16 (autocast; parameters stay float32)"),
    },
    "freezing": {
        "freeze": ("CRITERION", "none, static, gradient-norm, percentile, linear or geometric"),
        "cut": ("K", "with --freeze static: the first K blocks are frozen"),
        "interval": ("STEPS", "steps between votes; default: half an epoch"),
        "freeze_warmup": ("STEPS", "steps before the first vote; default: one epoch"),
        "patience": ("N", "a rank proposes what its criterion wanted N times in a row"),
        "eta_max": ("ETA", "a block whose gradient norm changes faster is not frozen"),
        "signal": ("WHICH", "gradients that the criterion sees: local (each rank's own) or averaged (no real vote)"),
        "vote_weight": ("HOW", "uniform, samples, loss, coverage, snr, or one number per rank"),
        "quorum": ("Q", "part of the weight that must support a cut, in (0, 1]"),
        "shadow": ("LIST", "criteria that are scored and logged without effect"),
    },
    "activation cache": {
        "cache": ("MODE", "off, auto (when it pays) or on; needs --augment none or views:K"),
        "cache_dir": ("DIR", "where its files stay after the run; default: the run directory"),
        "cache_dtype": ("TYPE", "native (exact), float16 or bfloat16"),
        "cache_limit": ("SIZE", "disk space over all ranks, as in 20G; default: none"),
        "cache_shared": ("", "ranks may read each other's files: the directory is on a shared file system"),
        "cache_failure": ("HOW", "on a full disk or a damaged file: recompute (go on without it) or stop"),
    },
    "run": {
        "seed": ("SEED", "of the model's initialisation and dropout"),
        "threads": ("N", "torch threads per rank; default: OMP_NUM_THREADS, else this rank's share of the cores"),
        "run_dir": ("DIR", "where the run's files go; default: runs/<time>-<name>"),
        "checkpoint_every": ("N", "epochs between checkpoints, or steps with the suffix s (200s); 0 is none"),
        "evaluate_every": ("N", "epochs between evaluations; the last epoch is always evaluated"),
        "resume": ("", "go on from the newest checkpoint in --run-dir, or start when there is none"),
        "json": ("", "print the summary as the last line"),
    },
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the program's own."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message and where to read more."""
        raise UsageError(f"{message}; '{self.prog} --help' explains")


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="hvfreeze", description=DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    add_train(commands)
    report = commands.add_parser("report", help="figures and one HTML page from run directories", allow_abbrev=False)
    report.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path)
    report.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the page and figures go")
    doctor = commands.add_parser("doctor", help="check this machine, or several hosts", allow_abbrev=False)
    doctor.add_argument("--hosts", metavar="HOST,...", help="check these hosts over ssh")
    doctor.add_argument("--hostfile", metavar="FILE", type=Path, help="check the hosts of a hostfile over ssh")
    doctor.add_argument("--data-dir", metavar="DIR", type=Path, help="must be readable on every host")
    doctor.add_argument("--cache-dir", metavar="DIR", type=Path, help="must be writable on every host")
    cache = commands.add_parser("cache", help="list, verify or remove cached activations", allow_abbrev=False)
    cache.add_argument("action", choices=("ls", "verify", "rm"))
    cache.add_argument("directory", metavar="DIR", type=Path)
    return parser


def add_train(commands: Any) -> None:
    """Add the train command: a flag for each leaf of the configuration."""
    train = commands.add_parser(
        "train",
        help="fine-tune a model, alone or as one rank of a job",
        description="Fine-tune a model; front blocks freeze by vote of all ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    train.add_argument("--config", metavar="FILE", type=Path, help="YAML file of the same names; flags override it")
    known = leaves()
    for title, flags in GROUPS.items():
        group = train.add_argument_group(title)
        for leaf, (metavar, text) in flags.items():
            _, field, kind = known[leaf]
            flag = "--" + leaf.replace("_", "-")
            if kind is bool:
                group.add_argument(flag, action="store_true", help=text)
            else:
                shown = text if field.default is None else f"{text} [{field.default}]"
                group.add_argument(flag, metavar=metavar, type=number_or_text(kind), help=shown)


def number_or_text(kind: Any) -> type:
    """Return the type that a flag's text is converted to."""
    options = typing.get_args(kind) or (kind,)
    return next(option for option in (int, float, str) if option in options)


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the command and its options.

    Raises:
        UsageError: an unknown command or flag, or a value of the wrong type.
        SystemExit: --help was asked for and printed.
    """
    parser = build_parser()
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], dict.fromkeys(COMMANDS))
        raise UsageError(f"unknown command '{arguments[0]}'{hint}; the commands are {', '.join(COMMANDS)}")
    options, rest = parser.parse_known_args(list(arguments))
    if rest:
        flags = {"--" + leaf.replace("_", "-"): None for leaf in leaves()} if options.command == "train" else {}
        word = rest[0].partition("=")[0]
        raise UsageError(f"unknown argument '{rest[0]}'{did_you_mean(word, flags)}")
    return options.command, options


def configuration(options: argparse.Namespace) -> Config:
    """Return the configuration that the train command's options ask for.

    Raises:
        UsageError: the file or a value is not acceptable.
    """
    given = {name: value for name, value in vars(options).items() if name in leaves()}
    path: Path | None = getattr(options, "config", None)
    if path is None:
        return from_dict(given, source="command line")
    source = f"--config ({path})"
    return from_dict({**flat(read_yaml(path), source=source), **given}, source=source)
