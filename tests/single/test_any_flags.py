"""Flags drawn from the whole command line of train: each of them changes the run, or the run says that it does not.

What a run is, is read off what it leaves: the numbers and the model, not the code that decides what is said. A flag is
taken away, and the run is made again; where nothing has changed, its line must have said so, and the other way round.
"""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration, flag_of
from hvfreeze.config.registry import STRATEGIES
from hvfreeze.config.tree import Config, leaves
from hvfreeze.errors import UsageError
from hvfreeze.freezing.criteria import CRITERIA, Criterion, Evidence
from tests.program import Outcome, call

FEW, MANY = 6, 2000
MODEL = """
from torch import nn


def make(num_classes):
    first, second = nn.Conv2d(3, 4, 5, 4), nn.Conv2d(4, 6, 3)
    head = nn.Linear(24, num_classes)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), head)


def normalised(num_classes):
    layers = list(make(num_classes))
    return nn.Sequential(*layers[:1], nn.BatchNorm2d(4), *layers[1:])
"""
EPOCHS = " --epochs 3"
BASE = "--model small_network:make --train-samples 60 --validation-fraction 0.2 --batch-size 8 --threads 1" + EPOCHS
KINDS = {
    "plain": "",
    "normalised": "--model small_network:normalised",
    "static": "--freeze static --cut 1",
    "gradients": "--freeze gradient-norm",
    "schedule": "--freeze linear",
    "auto": "auto --epochs 1",
    "tuned": "auto --epochs 3",
    "exact": "--head-fit exact --augment none",
    "kernel": "--head multi-level --head-fit kernel --augment none",
    "shared-trunk": "--strategy shared-trunk --augment none",
    "grid": "--strategy grid",
    "local-sgd": "--strategy local-sgd",
    "local-critics": "--strategy local-critics --parts 2",
    "subnets": "--strategy subnets --model mlp-16x16 --head last",
    "wide-head": "--head mlp-16",
}
"""Runs that flags are added to, of `train` unless they begin with another command."""
FLAGS = {
    "train_samples": ["50"],
    "validation_fraction": ["0.3"],
    "image_size": ["24"],
    "fit": ["squash --image-size 24", "pad --image-size 24"],
    "background": ["black"],
    "resample": ["bicubic --image-size 24"],
    "resize": ["28 --image-size 24", "36 --image-size 32"],
    "mean": ["0.4 --std 0.3"],
    "data_seed": ["6"],
    "shuffle": ["global"],
    "partition": ["dirichlet:0.5"],
    "shard_sizes": ["3"],
    "skip_bad": [""],
    "augment": ["none", "fresh", "views:2"],
    "recipe": ["random-resized-crop", "crop,color-jitter"],
    "cut": ["1"],
    "interval": ["1", "100"],
    "freeze_warmup": ["3", "100"],
    "patience": ["2"],
    "eta_max": ["1e-9"],
    "min_gain": ["1e-9"],
    "statistics": ["kept"],
    "signal": ["averaged", "averaged --clip-grad 0.01"],
    "vote_weight": ["samples"],
    "quorum": ["1"],
    "shadow": ["linear", "percentile"],
    "auto_without": ["votes", "guard", "last-solve"],
    "cache": ["on", "auto"],
    "cache_dir": ["kept"],
    "cache_dtype": ["float16"],
    "cache_limit": ["1"],
    "blocks": ["0,2,6", "0,6"],
    "weights": ["small_network.pt"],
    "reset_head": ["", " --weights small_network.pt"],
    "head": ["multi-level", "last"],
    "head_fit": ["exact", "kernel"],
    "pool": ["1"],
    "tokens": ["mean"],
    "centres": ["10"],
    "flips": ["off", "on"],
    "epochs": ["2"],
    "batch_size": ["6"],
    "accumulate": ["2"],
    "optimizer": ["adamw", "lars"],
    "lr": ["0.02"],
    "head_lr": ["0.3"],
    "momentum": ["0.5"],
    "nesterov": [""],
    "weight_decay": ["0.3"],
    "no_decay_norms": [" --weight-decay 0.3"],
    "clip_grad": ["0.001"],
    "label_smoothing": ["0.3"],
    "class_weights": ["balanced", "0=9"],
    "mixup": ["1"],
    "schedule": ["cosine", "step"],
    "lr_warmup": ["3", "500"],
    "compression": ["fp16", "powersgd:1"],
    "precision": ["bfloat16"],
    "heads": ["2"],
    "head_blocks": ["2"],
    "labels": ["ride"],
    "trunk": ["whole"],
    "cut_by": ["count"],
    "parts": ["1"],
    "replicas": ["1"],
    "micro_batches": ["4"],
    "pipeline": ["fill-drain"],
    "redeal": ["on"],
    "local_steps": ["3"],
    "critic_every": ["2"],
    "critic_lr": ["0.01"],
    "seed": ["5"],
    "threads": ["2"],
    "checkpoint_every": ["0"],
    "evaluate_every": ["2"],
    "metric": ["macro-f1"],
    "keep": ["best"],
    "early_stop": ["9"],
    "quiet": [""],
    "json": [""],
}
"""Values of each flag, that change a small run wherever it is read at all."""
LEFT_OUT = {
    **dict.fromkeys(("data", "model", "std", "freeze", "strategy", "cut_at", "tasks"), "a part of others here"),
    **dict.fromkeys(("run_dir", "resume", "resume_inexact"), "says where a run is, not what it is"),
    **dict.fromkeys(("cache_failure", "cache_shared"), "shows where something fails, or others take part"),
    **dict.fromkeys(("stale_after", "tied_gradient"), "for a ring of ranks"),
    "context": "for texts, which are no images",
    **dict.fromkeys(("task", "loss"), "for labels of other kinds than the digits have"),
    "data_dir": "the digits have none",
    "time_budget": "a clock decides",
    **dict.fromkeys(
        ("image_column", "label_column", "label_delimiter", "split_column", "test_table", "weight_column"),
        "for tables of labels",
    ),
    "track": "a library that need not be there",
}
MEASURED = ("seconds", "_per_second", "seconds_saved", "predicted", "peak_memory_bytes")
"""What keys end with whose values another run of the same settings does not have."""
MOST_FLAGS = 3


@dataclass(frozen=True)
class Made:
    """A run that was made, or refused."""

    outcome: Outcome
    notes: str
    """Of its log."""
    answers: str
    """How right its models were, in training and on held-out samples; empty where it was refused."""
    all: str
    """And of everything else that it left."""


class Page(html.parser.HTMLParser):
    """Counts the open tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Note that an element is there."""
        self.seen.append(tag)


def one_block_more(seen: Evidence) -> int:
    """Propose a block more as soon as there are gradients: a short run shows no other."""
    return min(seen.cut + (seen.norms is not None and seen.eta_max > 1e-6), seen.deepest)


def one_that_gains_more(seen: Evidence) -> int:
    """Propose a block more as soon as there are gains."""
    return min(seen.cut + (seen.gains is not None and seen.min_gain > 1e-6), seen.deepest)


class Runs:
    """Makes runs in a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, ...], Made] = {}
        self.directories: list[Path] = []

    def __call__(self, *words: str) -> Made:
        if words not in self._made:
            directory = self._folder / "runs" / str(len(self._made))
            shutil.rmtree(self._folder / "kept", ignore_errors=True)
            outcome = call(*command_of(words), "--run-dir", str(directory))
            assert outcome.returncode in (0, 2, 3) and "Traceback" not in outcome.stderr, f"{words}\n{outcome}"
            assert outcome.returncode == 0 or len(outcome.messages) == 1, f"{words}\n{outcome}"
            self._made[words] = self._seen(outcome, directory)
            self.directories += [directory] if outcome.returncode == 0 else []
        return self._made[words]

    def _seen(self, outcome: Outcome, directory: Path) -> Made:
        if outcome.returncode != 0:
            return Made(outcome, "", "", "")
        lines = [directory / name for name in ("metrics.jsonl", "decisions.jsonl")]
        numbers = [json.loads(line) for path in lines if path.exists() for line in path.read_text().splitlines()]
        right = [[entry.get(key) for key in ("epoch", "train_loss", "test_loss", "test_accuracy")] for entry in numbers]
        numbers.append(json.loads((directory / "summary.json").read_text()))
        models = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("model*.pt")}
        cards = {path.name: path.read_text() for path in directory.glob("model*.yaml")}
        places = (directory, self._folder / "kept")
        names = sorted(str(path.relative_to(place)) for place in places for path in place.rglob("*"))
        threads = json.loads((directory / "environment.json").read_text())["threads"]
        answers = repr(right)
        printed = (bool(outcome.stdout), outcome.stdout.rstrip().endswith("}"))
        return Made(
            outcome,
            (directory / "log.txt").read_text(),
            answers,
            repr([plain(numbers), models, cards, names, threads, printed]),
        )


def command_of(words: Sequence[str]) -> list[str]:
    """Return a whole command line."""
    is_auto = words[:1] == ("auto",)
    base = BASE.removesuffix(EPOCHS) if "--head-fit" in words else BASE
    return [*(("auto", "digits") if is_auto else ("train",)), *base.split(), *words[is_auto:]]


def plain(entry: Any) -> Any:
    """Return an entry of a file without what clocks have measured."""
    if isinstance(entry, dict):
        return {key: plain(value) for key, value in entry.items() if not key.endswith(MEASURED)}
    return [plain(each) for each in entry] if isinstance(entry, list) else entry


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("flags")
    (folder / "small_network.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))  # type: ignore[no-untyped-call]
        patch.setitem(CRITERIA, "gradient-norm", Criterion(one_block_more, watches="norms"))
        patch.setitem(CRITERIA, "coherence", Criterion(one_that_gains_more, watches="gains"))
        import small_network  # type: ignore[import-not-found]

        torch.manual_seed(9)
        torch.save(small_network.make(10).state_dict(), folder / "small_network.pt")
        yield Runs(folder)


def test_every_flag_is_drawn_or_says_why_not() -> None:
    assert set(FLAGS) | set(LEFT_OUT) == set(leaves()) and not set(FLAGS) & set(LEFT_OUT)
    # A ring is for texts.
    assert set(STRATEGIES) - set(KINDS) == {"replicas", "stale-ring"}


def told(made: Made, leaf: str) -> str:
    """Return what of a flag's effect the run said is not there: "no effect" or "limited effect", else nothing."""
    for line in made.notes.splitlines():
        found = re.search(r"note: (.+?) (?:has|have) (no|limited) effect: ", line)
        if found and flag_of(leaf) in re.split(r"[ ,:]+", found[1]):
            return f"{found[2]} effect"
    return ""


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """Draw a kind of run, and flags with values."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    chosen = draw(st.lists(st.sampled_from(sorted(FLAGS)), min_size=1, max_size=MOST_FLAGS, unique=True))
    return kind, {leaf: draw(st.sampled_from(FLAGS[leaf])) for leaf in chosen}


def words_of(kind: str, flags: dict[str, str]) -> list[str]:
    """Return the words of a command line."""
    return [*KINDS[kind].split(), *(word for leaf, text in flags.items() for word in [flag_of(leaf), *text.split()])]


def without(kind: str, flags: dict[str, str], leaf: str) -> list[str]:
    """Return the words of a command line without one flag and its own value; what else came with it stays."""
    rest = {other: text for other, text in flags.items() if other != leaf}
    _, double, others = flags[leaf].partition("--")
    return [*words_of(kind, rest), *f"{double}{others}".split()]


def asked_by(words: list[str]) -> Config | None:
    """Return the settings that a command line asks for; those of a flag that gives the default are the same."""
    try:
        return configuration(parse(command_of(tuple(words))))
    except UsageError:
        return None


def check(runs: Runs, *, examples: int) -> None:
    """Draw command lines, and check each that is accepted."""

    @given(commands())
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def holds(command: tuple[str, dict[str, str]]) -> None:
        kind, flags = command
        made = runs(*words_of(kind, flags))
        assume(made.outcome.returncode == 0)
        for leaf in flags:
            fewer, says = without(kind, flags, leaf), told(made, leaf)
            where = f"{words_of(kind, flags)}: {flag_of(leaf)}\n{made.notes}"
            if says == "no effect":
                assert runs(*fewer).answers in (made.answers, ""), f"says that it has no effect, and has one: {where}"
            elif not says and asked_by(fewer) != asked_by(words_of(kind, flags)):
                assert runs(*fewer).all != made.all, f"has no effect, and nothing says so: {where}"

    holds()
    for directory in runs.directories if examples == MANY else runs.directories[::4]:
        applied = call(
            "evaluate", str(directory), "--trust-code", "--model-name", sorted(directory.glob("model*.pt"))[0].stem
        )
        assert applied.returncode == 0, f"{directory}\n{applied}"
    listed = call("runs", str(runs.directories[0].parent))
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) > len(runs.directories), str(listed)
    page = runs.directories[0].parent / "report"
    written = call("report", *map(str, runs.directories[-2:]), "--out", str(page))
    assert written.returncode == 0, str(written)
    parser = Page()
    parser.feed((page / "index.html").read_text())
    assert {"table", "svg"} & set(parser.seen) and "html" in parser.seen


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("undrawn")
def test_a_flag_changes_the_run_or_the_run_says_that_it_does_not(runs: Runs) -> None:
    check(runs, examples=FEW)


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("undrawn")
def test_many_flags_change_the_run_or_the_run_says_that_they_do_not(runs: Runs) -> None:
    check(runs, examples=MANY)
