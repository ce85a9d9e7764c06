"""The commands: their arguments and the functions that perform them, imported on demand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvfreeze import __version__
from hvfreeze.errors import EXIT_CODES, UsageError
from hvfreeze.imports import kept_for_good
from hvfreeze.wording import did_you_mean

DESCRIPTION = "Fine-tune image classifiers on CPUs. Start with: hvfreeze auto digits"


@dataclass(frozen=True)
class Command:
    """A command that does not start a run."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    perform: Callable[..., int]
    """Function that takes the options by name and returns the exit code."""


def path(text: str) -> Path:
    """Convert an argument to a path.

    Raises:
        ArgumentTypeError: it is empty, as from an unset shell variable; `Path` would read it as the working directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; a shell variable may be unset")
    return Path(text)


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze predict`."""
    parser.add_argument("run_dir", metavar="RUN", type=path, help="directory of a finished run")
    parser.add_argument(
        "given",
        metavar="IMAGE",
        nargs="+",
        help="image files, folders or tables of images, hf:PATH; for a language model, a text",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=path, help="write the CSV, or the text, to this file; default: print it"
    )
    parser.add_argument(
        "--top",
        metavar="K",
        type=int,
        help="show the K most probable classes, default 1; for text: "
        "sample from the K most probable characters, default all",
    )
    for name, kind, text in (
        ("length", int, "number of characters, default 200"),
        ("temperature", float, "0: the most probable character; higher: more random; default 0.8"),
        ("seed", int, "seed for sampling characters, default 0"),
    ):
        more = f"language models: {text}"
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=argparse.SUPPRESS, help=more)
    add_how(parser)


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the model and the batch size."""
    add_which(parser)
    parser.add_argument(
        "--batch-size", metavar="N", type=int, help="images per batch; default: as in the run's evaluation"
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip unreadable images; without it they end the command with exit code 3",
    )
    add_exits(parser)


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a model of a run and trust its code."""
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        dest="name",
        default="model",
        help="model of a run with several, such as model-head0",
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="allow the run's own Python function (package:function) to build the model",
    )


def add_exits(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of early exits."""
    parser.add_argument(
        "--exit",
        metavar="N",
        dest="exit_at",
        help="runs of --strategy local-critics: predict at exit N (1 is the first), or ensemble: average all exits",
    )
    parser.add_argument(
        "--exit-confidence",
        metavar="P",
        dest="confidence",
        type=float,
        help="the same runs: a sample leaves at the first exit with this probability, such as 0.9; "
        "shows the share of samples and FLOPs per exit",
    )


def predict(**options: Any) -> int:
    """Print the classes of images, or continue a text."""
    with kept_for_good():
        from hvfreeze.inference import predict as predicting

    drawing: dict[str, Any] = {name: options.pop(name) for name in ("length", "temperature", "seed") if name in options}
    return predicting.predict(**options, drawing=drawing)


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze evaluate`."""
    parser.add_argument("run_dir", metavar="RUN", type=path, help="directory of a finished run")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        type=path,
        help="DIR/test/CLASS/, DIR/val/CLASS/ or DIR/CLASS/, a table, a text file; default: the run's test data",
    )
    parser.add_argument("--out", metavar="DIR", type=path, help="write tables and the confusion matrix to this folder")
    add_how(parser)


def evaluate(**options: Any) -> int:
    """Print the accuracy of a model."""
    with kept_for_good():
        from hvfreeze.inference import evaluate as evaluating

    return evaluating.evaluate(**options)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze export`."""
    parser.add_argument("run_dir", metavar="RUN", type=path, help="directory of a finished run")
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
    """Export a model."""
    with kept_for_good():
        from hvfreeze.inference import export as exporting

    return exporting.export(**options)


def add_blocks(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze blocks`."""
    parser.add_argument(
        "model", metavar="MODEL", help="a torchvision classifier, timm:NAME, hf:FOLDER or package:function"
    )
    schemes = "stage, residual, paper or NAME,NAME,..."
    parser.add_argument("--blocks", metavar="HOW", dest="scheme", default="stage", help=schemes)
    for name, number, text in (
        ("image-size", 224, "side of the images in pixels"),
        ("classes", 1000, "number of classes"),
        ("batch-size", 16, "images per timed batch"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=int, default=number, help=f"{text}; default {number}")


def blocks(**options: Any) -> int:
    """Print the cuts of a model."""
    with kept_for_good():
        from hvfreeze.inference.blocks_table import show_blocks

    return show_blocks(**options)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze report`."""
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", type=path, help="directories of runs, finished or not"
    )
    parser.add_argument("--out", metavar="DIR", type=path, required=True, help="folder for the page and the figures")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=int,
        nargs="?",
        const=30,
        help="while runs train, look for new epochs every SECONDS [30], and update and reload the page",
    )


def report(run_dirs: list[Path], out: Path, watch: int | None) -> int:
    """Write a report of run directories."""
    from hvfreeze.report.report import watch_report, write_report

    return write_report(run_dirs, out=out) if watch is None else watch_report(run_dirs, out=out, seconds=watch)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze runs`."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=path,
        nargs="?",
        default=Path("runs"),
        help="folder of run directories; default: runs",
    )


def runs(folder: Path) -> int:
    """List the run directories in a folder."""
    from hvfreeze.report.listing import list_runs

    return list_runs(folder)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze doctor`."""
    parser.add_argument("--hosts", metavar="HOST,...", help="check these hosts over ssh")
    parser.add_argument("--hostfile", metavar="FILE", type=path, help="check the hosts of a hostfile over ssh")
    parser.add_argument("--data-dir", metavar="DIR", type=path, help="check that every host can read this folder")
    parser.add_argument("--cache-dir", metavar="DIR", type=path, help="check that every host can write this folder")


def doctor(hosts: str | None, hostfile: Path | None, data_dir: Path | None, cache_dir: Path | None) -> int:
    """Check this machine, or the given hosts."""
    from hvfreeze.doctor.hosts import parse_hosts, read_hostfile, run_hosts_doctor
    from hvfreeze.doctor.this_machine import run_doctor

    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile exclude each other; give one of them")
    if hosts is not None:
        return run_hosts_doctor(parse_hosts(hosts), data_dir=data_dir, cache_dir=cache_dir)
    if hostfile is not None:
        return run_hosts_doctor(read_hostfile(hostfile), data_dir=data_dir, cache_dir=cache_dir)
    for flag, folder in (("--data-dir", data_dir), ("--cache-dir", cache_dir)):
        if folder is not None:
            raise UsageError(f"{flag} ({folder}) needs --hosts or --hostfile, whose hosts check it")
    return run_doctor()


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvfreeze cache`."""
    parser.add_argument("action", choices=("ls", "verify", "rm"), help="list, check or remove the cache files")
    parser.add_argument("directory", metavar="DIR", type=path, help="the --cache-dir of a run")


def cache(action: str, directory: Path) -> int:
    """List, verify or remove cached activations."""
    from hvfreeze.cache import commands

    return {"ls": commands.ls, "verify": commands.verify, "rm": commands.rm}[action](directory)


COMMANDS = {
    "predict": Command("predict the classes of images (or continue a text) with a finished run", add_predict, predict),
    "evaluate": Command("measure the accuracy of a finished run, in total and per class", add_evaluate, evaluate),
    "export": Command("export a finished run to ONNX, PyTorch, safetensors or transformers", add_export, export),
    "blocks": Command("list a model's blocks, and the time that freezing them saves here", add_blocks, blocks),
    "report": Command("compare runs: one HTML page with figures", add_report, report),
    "runs": Command("list the runs in a folder", add_runs, runs),
    "doctor": Command("check this machine, or several hosts", add_doctor, doctor),
    "cache": Command("list, verify or remove cached activations", add_cache, cache),
}


RUNS = {
    "auto": "fine-tune a model on your images; chooses the method and the settings",
    "train": "train with your own settings",
}
"""Commands that start a run."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message and a pointer to --help."""
        for pattern, plain in PLAIN.items():
            message = re.sub(pattern, plain, message)
        raise UsageError(f"{message}; see '{self.prog} --help'")


PLAIN = {
    r"^argument (\S+?)(/\S+)?: invalid int value: '(.*)'$": r"\1 (\3) must be a whole number",
    r"^argument (\S+?)(/\S+)?: invalid float value: '(.*)'$": r"\1 (\3) must be a number",
    r"^argument (\S+?)(/\S+)?: invalid choice: '(.*)' \(choose from (.*)\)$": r"\1 (\3) must be one of \4",
    r"^argument (\S+?)(/\S+)?: expected one argument$": r"\1 needs a value",
    r"^the following arguments are required: (.*)$": r"missing: \1",
    r"^argument (\S+?)(/\S+)?: ": r"\1: ",
}
"""Messages of argparse, and what they mean."""


def build_parser(words: Sequence[str] | None = None) -> Parser:
    """Return the parser of all commands, with the flags of the command in `words` alone."""
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
        description = f"{command.help[0].upper()}{command.help[1:]}."
        command.add_arguments(commands.add_parser(name, help=command.help, description=description, allow_abbrev=False))
    return parser


def hint_at_argument(word: str, command: str) -> str:
    """Return a hint for a flag that a command which starts no run does not know."""
    parser = Parser(allow_abbrev=False)
    COMMANDS[command].add_arguments(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    places = {action.dest: str(action.metavar) for action in parser._actions if not action.option_strings}
    is_place = word[2:].replace("-", "_") in {name.removesuffix("s") for name in places}
    if close := "" if is_place else did_you_mean(word, flags):
        return close
    return f"; write hvfreeze {command} {' '.join(places.values())}" if word.startswith("-") and places else ""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; the command's name is `command`.

    Raises:
        UsageError: an unknown command or flag, or a value of the wrong type.
        SystemExit: --help or --version was printed.
    """
    names = (*RUNS, *COMMANDS)
    if arguments and arguments[0] not in names and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], dict.fromkeys(names))
        raise UsageError(f"unknown command '{arguments[0]}'{hint}; the commands are {', '.join(names)}")
    options, rest = build_parser(list(arguments)).parse_known_args(list(arguments))
    if rest:
        hint = ""
        if options.command not in RUNS:
            hint = hint_at_argument(rest[0].partition("=")[0], options.command)
        else:
            from hvfreeze.config.flags import hint_at

            hint = hint_at(rest[0].partition("=")[0], options.command)
            if not rest[0].startswith("-"):
                hint = "; name data with --data or --data-dir" if options.command == "train" else "; give one DATA"
                place = arguments.index(rest[0])
                if place > 1 and arguments[place - 2].startswith("--"):
                    hint = f"; write the value of {arguments[place - 2]} as one word, or in quotes"
        raise UsageError(f"unknown argument '{rest[0]}'{hint}")
    return options


def perform(arguments: Sequence[str]) -> int:
    """Perform a command that does not start a run, and return its exit code."""
    options = vars(parse(arguments))
    return COMMANDS[options.pop("command")].perform(**options)
