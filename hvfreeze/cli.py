"""The commands: what each is called with and which code performs it, imported when it is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvfreeze import __version__
from hvfreeze.errors import EXIT_CODES, UsageError
from hvfreeze.torch_imports import kept_for_good
from hvfreeze.wording import did_you_mean

DESCRIPTION = "Fine-tune vision models on CPU nodes: ranks vote which front layers to freeze, and cache their output."


@dataclass(frozen=True)
class Command:
    """A command that makes no run."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    perform: Callable[..., int]
    """Takes the options by name, and returns the exit code."""


def path(text: str) -> Path:
    """Return a path, which must not be empty: a shell gives that for a variable that is not set, and it is no folder's.

    Raises ArgumentTypeError where it is; `Path` would take it for the working directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; a variable of the shell may not be set")
    return Path(text)


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze predict` takes."""
    parser.add_argument("run_dir", metavar="RUN", type=path, help="a finished run's directory")
    parser.add_argument(
        "given",
        metavar="IMAGE",
        nargs="+",
        help="image files, folders of them, tables that name them, hf:PATH; a text, where the model continues texts",
    )
    parser.add_argument("--out", metavar="FILE", type=path, help="write CSV, or the text, there; default: print it")
    parser.add_argument(
        "--top", metavar="K", type=int, help="the K most probable classes, default 1; of a text's next characters all"
    )
    for name, kind, text in (
        ("length", int, "number of characters, default 200"),
        ("temperature", float, "0 takes the most probable character, more makes others likelier, default 0.8"),
        ("seed", int, "of the characters that are drawn, default 0"),
    ):
        more = f"for a text's model: {text}"
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=argparse.SUPPRESS, help=more)
    add_how(parser)


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add which model is applied, and to how many images at once."""
    add_which(parser)
    parser.add_argument(
        "--batch-size", metavar="N", type=int, help="images at once; default: as in the run's evaluation"
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out images that cannot be used; without it the exit code is 3"
    )
    add_exits(parser)


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a model of a run and allow its custom code."""
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        dest="name",
        default="model",
        help="which of a run's several models, as in model-head0",
    )
    parser.add_argument("--trust-code", action="store_true", help="run the function that the run's model is made by")


def add_exits(parser: argparse.ArgumentParser) -> None:
    """Add at which of its exits a model answers that was trained with local critics."""
    parser.add_argument(
        "--exit",
        metavar="N",
        dest="exit_at",
        help="of a run of --strategy local-critics: answer at exit N, 1 for the first, or all together: ensemble",
    )
    parser.add_argument(
        "--exit-confidence",
        metavar="P",
        dest="confidence",
        type=float,
        help="of the same: a sample leaves at the first exit that gives a class this probability, such as 0.9; tells "
        "the share of samples and of FLOPs of each exit",
    )


def predict(**options: Any) -> int:
    """Print the classes of images, or the continuation of a text."""
    with kept_for_good():
        from hvfreeze.inference import predict as predicting
        from hvfreeze.inference.text import Drawing

    drawing = {name: options.pop(name) for name in ("length", "temperature", "seed") if name in options}
    return predicting.predict(**options, drawing=Drawing(**drawing) if drawing else None)


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze evaluate` takes."""
    parser.add_argument("run_dir", metavar="RUN", type=path, help="a finished run's directory")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        type=path,
        help="DIR/test/CLASS/, DIR/val/CLASS/ or DIR/CLASS/, a table, a text's file; default: what the run was "
        "evaluated on",
    )
    parser.add_argument("--out", metavar="DIR", type=path, help="write tables and the confusion figure there")
    add_how(parser)


def evaluate(**options: Any) -> int:
    """Print the accuracy of a model."""
    with kept_for_good():
        from hvfreeze.inference import evaluate as evaluating

    return evaluating.evaluate(**options)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze export` takes."""
    parser.add_argument("run_dir", metavar="RUN", type=path, help="a finished run's directory")
    parser.add_argument(
        "--format",
        dest="form",
        choices=("onnx", "torch", "safetensors", "transformers"),
        default="onnx",
        help="onnx (default), torch (for torch.export.load), safetensors (the state_dict) or transformers (a folder, "
        "of models hf:... with their own last layer)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=path, help="default: RUN/model.onnx, .pt2 or .safetensors, or RUN/transformers"
    )
    add_which(parser)


def export(**options: Any) -> int:
    """Write a model as a file that runs elsewhere."""
    with kept_for_good():
        from hvfreeze.inference import export as exporting

    return exporting.export(**options)


def add_blocks(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze blocks` takes."""
    parser.add_argument(
        "model", metavar="MODEL", help="as for train: a torchvision classifier, timm:NAME, hf:FOLDER, package:function"
    )
    schemes = "stage, residual, paper or NAME,NAME,..."
    parser.add_argument("--blocks", metavar="HOW", dest="scheme", default="stage", help=schemes)
    for name, number, text in (
        ("image-size", 224, "side of the images in pixels"),
        ("classes", 1000, "outputs of the head"),
        ("batch-size", 16, "images that are timed at once"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=int, default=number, help=f"{text}; default {number}")


def blocks(**options: Any) -> int:
    """Show where a model may be cut."""
    with kept_for_good():
        from hvfreeze.inference.blocks_table import show_blocks

    return show_blocks(**options)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze report` takes."""
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=path)
    parser.add_argument("--out", metavar="DIR", type=path, required=True, help="where the page and figures go")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=int,
        nargs="?",
        const=30,
        help="write it again after every epoch while jobs run, and let the page reload itself; default: every 30 s",
    )


def report(run_dirs: list[Path], out: Path, watch: int | None) -> int:
    """Write a report on run directories."""
    from hvfreeze.report.report import watch_report, write_report

    return write_report(run_dirs, out=out) if watch is None else watch_report(run_dirs, out=out, seconds=watch)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze runs` takes."""
    parser.add_argument("folder", metavar="DIR", type=path, nargs="?", default=Path("runs"), help="default: runs")


def runs(folder: Path) -> int:
    """List the run directories in a folder."""
    from hvfreeze.report.listing import list_runs

    return list_runs(folder)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze doctor` takes."""
    parser.add_argument("--hosts", metavar="HOST,...", help="check these hosts over ssh")
    parser.add_argument("--hostfile", metavar="FILE", type=path, help="check the hosts of a hostfile over ssh")
    parser.add_argument("--data-dir", metavar="DIR", type=path, help="must be readable on every host")
    parser.add_argument("--cache-dir", metavar="DIR", type=path, help="must be writable on every host")


def doctor(hosts: str | None, hostfile: Path | None, data_dir: Path | None, cache_dir: Path | None) -> int:
    """Check this machine, or the hosts that were named."""
    from hvfreeze.doctor.hosts import parse_hosts, read_hostfile, run_hosts_doctor
    from hvfreeze.doctor.this_machine import run_doctor

    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name hosts; give one of them")
    if hosts is not None:
        return run_hosts_doctor(parse_hosts(hosts), data_dir=data_dir, cache_dir=cache_dir)
    if hostfile is not None:
        return run_hosts_doctor(read_hostfile(hostfile), data_dir=data_dir, cache_dir=cache_dir)
    for flag, folder in (("--data-dir", data_dir), ("--cache-dir", cache_dir)):
        if folder is not None:
            raise UsageError(f"{flag} ({folder}) must be given with --hosts or --hostfile, whose hosts look for it")
    return run_doctor()


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add what `hvfreeze cache` takes."""
    parser.add_argument("action", choices=("ls", "verify", "rm"))
    parser.add_argument("directory", metavar="DIR", type=path)


def cache(action: str, directory: Path) -> int:
    """List, verify or remove cached activations."""
    from hvfreeze.cache import commands

    return {"ls": commands.ls, "verify": commands.verify, "rm": commands.rm}[action](directory)


COMMANDS = {
    "predict": Command("classes of images, or the continuation of a text, from a finished run", add_predict, predict),
    "evaluate": Command("accuracy of a finished run by class, or bits per character", add_evaluate, evaluate),
    "export": Command("an ONNX, PyTorch or safetensors file from a finished run", add_export, export),
    "blocks": Command("where a model may be cut, and what that saves on this machine", add_blocks, blocks),
    "report": Command("figures and one HTML page from run directories", add_report, report),
    "runs": Command("a table of the run directories in a folder", add_runs, runs),
    "doctor": Command("check this machine, or several hosts", add_doctor, doctor),
    "cache": Command("list, verify or remove cached activations", add_cache, cache),
}


RUNS = {
    "auto": "fine-tune a model on a folder of images; chooses how",
    "train": "fine-tune a model, with every setting by hand",
}
"""The commands that make a run."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the program's own."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message and where to read more."""
        raise UsageError(f"{message}; '{self.prog} --help' explains")


def build_parser(words: Sequence[str] | None = None) -> Parser:
    """Return the parser of all commands, or with the flags of that alone with which a command line begins."""
    parser = Parser(
        prog="hvfreeze",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvfreeze {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, text in RUNS.items():
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        if words is None or words[:1] == [name]:
            from hvfreeze.config.flags import add_flags

            add_flags(added, words or ())
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, allow_abbrev=False))
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the arguments ask for, the command's name as `command`.

    Raises:
        UsageError: an unknown command or flag, or a value of the wrong type.
        SystemExit: --help or --version was asked for and printed.
    """
    names = (*RUNS, *COMMANDS)
    if arguments and arguments[0] not in names and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], dict.fromkeys(names))
        raise UsageError(f"unknown command '{arguments[0]}'{hint}; the commands are {', '.join(names)}")
    options, rest = build_parser(list(arguments)).parse_known_args(list(arguments))
    if rest:
        hint = ""
        if options.command in RUNS:
            from hvfreeze.config.flags import hint_at

            hint = hint_at(rest[0].partition("=")[0], options.command)
        raise UsageError(f"unknown argument '{rest[0]}'{hint}")
    return options


def perform(arguments: Sequence[str]) -> int:
    """Run a command that makes no run, and return its exit code."""
    options = vars(parse(arguments))
    return COMMANDS[options.pop("command")].perform(**options)
