"""Every command that a guide shows runs: on one rank, with a few small images, a small model and one epoch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvfreeze.cli import COMMANDS, RUNS, parse
from hvfreeze.config.flags import AUTO_EXAMPLES, EXAMPLES, configuration
from tests.program import OFFLINE, ROOT, call, save_photos

LEFT_OUT = {
    "doctor": "asks other machines",
    "export": "tests/single/inference/test_exporting.py exports",
    "report": "tests/single/report/test_report.py writes pages",
    "--track": "needs a library that is not installed",
    **dict.fromkeys(("hf:vit-base", "transformers"), "tests/single/model/test_hugging_face.py runs such models"),
}
"""Words of commands that are only parsed here, and the reason."""
SELDOM = {"docs/results.md", "docs/tables.md"}
"""Pages whose commands load large libraries, or are similar to those of other pages."""
SMALL_MODEL, WITH_LINEAR_LAYER = "mlp-8x8x8x8x8", "shufflenet_v2_x0_5"
INSTEAD = {
    "DEFAULT": "none",
    "cifar10": "digits",
    "cifar100": "digits",
    "/scratch/cache": "cache",
    "resnet18": SMALL_MODEL,
    "resnet20": SMALL_MODEL,
    "resnet110": SMALL_MODEL,
    "mlp-2048x2048": SMALL_MODEL,
    "mlp-4096": "mlp-16",
    "200": "9",
    "224": "32",
}
"""Words of commands and their replacements, which need no network, no other data and little time."""
TABLES = {
    "docs/labels.md": ("image,cat,dog,bird,age,trust,split", "{image},{even},{odd},{even},{number},{number},{split}"),
    "docs/strategies/shared-trunk.md": ("split,sample,species,rough", "{split},{number},{even},{odd}"),
}
"""The header and the rows of labels.csv on a page."""
SMALL = {
    "": f"--image-size 16 --model {SMALL_MODEL}",
    "grid": "--image-size 16 --parts 1 --micro-batches 2 --blocks hidden2,head",
    "local-critics": f"--image-size 16 --parts 2 --blocks hidden2,head --model {SMALL_MODEL}",
    "stale-ring": "--parts 2 --data-dir text.txt --context 8",
    "text": "--data-dir text.txt --context 8",
}
"""Flags that make a run small, by its strategy or data."""


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words behind `hvfreeze` of each command in a text's lines, which may end in a backslash."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if re.search(r"\bhvfreeze [a-z]", line) else []
        while "hvfreeze" in words:
            words = words[words.index("hvfreeze") + 1 :]
            if words and words[0] in (*RUNS, *COMMANDS):
                yield words


def commands_of_guides() -> list[tuple[str, list[str]]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [
        (page, block) for page in pages for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    found = [(page.relative_to(ROOT).as_posix(), words) for page, block in blocks for words in commands_in(block)]
    return found + [("--help", words) for text in (EXAMPLES, AUTO_EXAMPLES) for words in commands_in(text)]


def pages() -> dict[str, list[list[str]]]:
    """Return the pages with the commands that no earlier page has."""
    found: dict[str, list[list[str]]] = {}
    first: dict[tuple[str, ...], str] = {}
    for page, words in commands_of_guides():
        if first.setdefault(tuple(words), page) == page and words not in found.get(page, []):
            found.setdefault(page, []).append(words)
    return found


def save_material(page: str, folder: Path) -> None:
    """Save what the commands of a page read."""
    save_photos(folder / "photos", training=8)
    (folder / "FOLDER").symlink_to("photos/test/a")
    (folder / "text.txt").write_text("def main(x):\n    return x\n" * 40)
    header, row = TABLES.get(page, ("image,label,split", "{image},{even},{split}"))
    rows = [header]
    for split in ("train", "test"):
        for number, image in enumerate(sorted((folder / "photos" / split).rglob("*.png"))):
            values = {"image": image.relative_to(folder), "split": split, "number": number}
            rows.append(row.format(even=int(number % 2 == 0), odd=number % 2, **values))
    (folder / "labels.csv").write_text("\n".join(rows))
    if page == "docs/tables.md":
        import datasets

        images = datasets.load_dataset("imagefolder", data_dir=str(folder / "photos"), cache_dir=str(folder / "hub"))
        images.save_to_disk(str(folder / "my_dataset"))


def small(words: list[str]) -> list[str]:
    """Return a command with flags that make its run small."""
    known = INSTEAD | {"resnet18": WITH_LINEAR_LAYER} if "mlp-4096" in words else INSTEAD
    words = [known.get(word, word) for word in words if word != "..."]
    if words[0] not in RUNS or "--resume" in words:
        return words
    kind = words[words.index("--strategy") + 1] if "--strategy" in words else "text" if "text" in words else ""
    flags = SMALL.get(kind, SMALL[""]).split()
    flags = flags[: flags.index("--model")] if "--model" in flags and "--model" in words else flags
    flags += [] if "--head-fit" in words else ["--epochs", "1"]
    flags += ["--lr", "0.001"] if "--lr" in words else []
    flags += [] if {"photos", "labels.csv"} & set(words) else ["--train-samples", "16"]
    return [*words, *flags, "--threads", "1", "--batch-size", "4"]


def with_runs(words: list[str]) -> list[str]:
    """Return a command with the runs that it names; one that no command has made is made."""
    runs = sorted(Path("runs").glob("*"), key=lambda path: path.stat().st_mtime)
    newest = str(runs[-1]) if runs else "runs/first"
    named = {"runs/NAME": newest, "runs/first": "runs/first", "RUN": "RUN", "runs/good/config.yaml": "runs/good"}
    for word in set(words) & set(named) if words[0] != "auto" else ():
        if not Path(named[word]).exists():
            made = call(*small(f"train --data imagefolder --data-dir photos --run-dir {named[word]}".split()))
            assert made.returncode == 0, made
    words = [newest if word == "runs/NAME" else word for word in words]
    return [name for word in words for name in (map(str, runs) if word == "runs/*" else [word])]


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        pytest.param(page, commands, id=page, marks=[pytest.mark.seldom] if page in SELDOM else [])
        for page, commands in pages().items()
    ],
)
def test_the_commands_of_a_guide_run(
    page: str, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    save_material(page, tmp_path)
    for words in commands:
        if set(words) & set(LEFT_OUT):
            options = parse(words)
            assert words[0] not in RUNS or configuration(options)
            continue
        line = small(with_runs(words))
        outcome = call(*line)
        assert outcome.returncode == 0, f"{' '.join(line)}\n{outcome}"


def test_the_guides_show_commands() -> None:
    found = [words[0] for _, words in commands_of_guides()]
    assert found.count("train") >= 20 and found.count("auto") >= 4
