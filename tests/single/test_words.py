"""Pages, messages and docstrings use the field's words: the private words of earlier versions do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import ROOT

PAGES = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "README.md",
    "launch/README.md",
    *sorted(
        str(path.relative_to(ROOT)) for folder in ("analysis/pages", "docs") for path in (ROOT / folder).rglob("*.md")
    ),
]
CODE = ["analysis", "cache", "hvfreeze", "launch"]
"""Folders whose messages and docstrings are searched."""
WORDS = {
    r"solv(e|es|ed|ing)|solutions?": "fit, fitted head",
    r"likeness(es)?": "kernel value",
    r"owed|what was left out": "error-feedback residual",
    r"mirror(ed)? images?": "horizontal flips",
    r"(a|the) look|looked at|looks? again": "gradient probe, probed",
    r"(?<!fine-)tun(e|es|ed|ing)": "fine-tune, fine-tuning",
    r"not finite": "NaN or Inf",
    r"of one's own|of (your|its|their) own(?! [a-z])": "custom model, custom dataset, your training script",
    r"statistics of the weights": "the pretrained BatchNorm statistics",
    r"ranks? (\d+ )?tells?|(is|are|was|be) told": "rank 0 logs, the log says",
    r"views of a sample": "augmented views",
    r"grounds?": "task, benchmark",
    r"made rows": "synthetic rows",
    r"\d+(\.\d+)?x as fast|of its time": "3.1x faster",
    r"settles?|settled": "synchronize, stabilize",
    r"anew|afresh": "restart from scratch",
    r"doubles": "train/test duplicates",
    r"exposed wait": "communication time not hidden by computation",
    r"go(es)? on": "continue",
    r"in vain": "without effect",
    r"nobody|whoever": "no rank, no process; or the passive voice",
    r"beside": "next to, with, compared with",
    r"by itself|by themselves": "alone, automatically",
    r"l(ies|ie|ay) in": "is in, is stored in",
    r"such that are|those that|that which": "a noun",
    r"as far as": "up to, if",
    r"\d{1,3} \d{3}": "5,000",
}
"""A private word, as a regular expression, and what the field says."""
FIRST_WORDS = {
    r"What": "a noun phrase",
    r"Of": "the quantity and its unit",
    r"Tell|Tells": "Return True if ..., or Log ...",
    r"Let": "the verb for what happens",
    r"Those|That|Such|Whose|As|By|With|To": "a noun phrase",
}
"""Words that no docstring begins with, and what to begin with."""
EXCEPTIONS = {
    ("hvfreeze/comm/horovod_world.py", "Args: beside"): "the name of an argument",
    ("hvfreeze/freezing/coherence.py", "the distance doubles"): "the verb",
    ("hvfreeze/integration/horovod_compat.py", "beside."): "the name of a parameter",
}
"""A page or module and words in it that are no private words there, with the reason."""
MESSAGE_WORDS = 3
"""Fewer words are a name or a key."""


ANY_WORD = re.compile(rf"(?i)(?<![\w-])({'|'.join(WORDS)})(?![\w-])")
"""Any private word: most texts have none."""


def prose(text: str) -> str:
    """Return a page without code, generated parts and targets of links, which are named and written elsewhere."""
    left_out = (
        r"(?ms)^ *```.*?^ *```$",
        r"(?s)<!-- (\S+) -->.*?<!-- /\1 -->",
        r"(?s)\{[{%].*?[%}]\}",
        r"`[^`]*`",
        r"(?<=\])\([^)]*\)",
    )
    for pattern in left_out if set("`<{(") & set(text) else ():
        text = re.sub(pattern, "", text)
    return re.sub(r"\s+", " ", text)


def private_words(text: str) -> Iterator[str]:
    """Yield every private word of a page's prose, with its neighbours and what to write."""
    plain = prose(text)
    for words, instead in WORDS.items() if ANY_WORD.search(plain) else ():
        for found in re.finditer(rf"(?i)(?<![\w-])({words})(?![\w-])", plain):
            yield f"{plain[max(0, found.start() - 30) : found.end() + 30].strip()!r}: write {instead}"


def modules() -> list[str]:
    """Return the modules of `CODE`."""
    places = [ROOT / place for place in CODE]
    found = [path for place in places for path in sorted(place.rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in found]


def texts(module: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the text and whether it is a docstring, of all docstrings and messages of a module."""
    tree, docstrings, inner = ast.parse(module.read_text()), set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings |= {id(each.value) for each in node.body if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= set(map(id, node.values))
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts)), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            is_docstring = id(node) in docstrings
            if is_docstring or len(node.value.split()) >= MESSAGE_WORDS:
                yield node.lineno, node.value, is_docstring


def private_texts(module: str) -> Iterator[str]:
    """Yield every private word in a module's docstrings and messages, and every docstring that begins with one.

    Questions of experiments may begin with any word.
    """
    for line, text, is_docstring in texts(ROOT / module):
        for found in private_words(text):
            yield f"line {line}: {found}"
        for words, instead in FIRST_WORDS.items():
            first = text.partition("\n")[0]
            if is_docstring and "?" not in first and re.match(rf"({words})\b", text):
                yield f"line {line}: {first!r}: begin with {instead}"


def unexcepted(where: str, found: list[str]) -> list[str]:
    """Return the findings without the exceptions of a page or module."""
    excepted = [words for (place, words) in EXCEPTIONS if place == where]
    return [each for each in found if not any(words in each for words in excepted)]


def test_pages_messages_and_docstrings_have_no_private_words_and_every_exception_is_needed() -> None:
    found = {page: list(private_words((ROOT / page).read_text())) for page in PAGES}
    found |= {module: list(private_texts(module)) for module in modules()}
    assert {place: left for place, words in found.items() if (left := unexcepted(place, words))} == {}
    assert [(place, words) for place, words in EXCEPTIONS if not any(words in each for each in found[place])] == []


@pytest.mark.parametrize(
    ("count", "texts"),
    [
        (
            1,
            ["The head is solved.", "A fine-tuned block; a tuned one.", "It\ngoes on.", "5 000 images"],
        ),
        (0, ["`--mirror images`", "fine-tuning", "[rows](solved.md)", "```\nanew\n```", "tunable"]),
    ],
)
def test_private_words_are_found_outside_of_code_links_and_longer_words(count: int, texts: list[str]) -> None:
    assert [len(list(private_words(text))) for text in texts] == [count] * len(texts)


def test_docstrings_and_messages_of_a_module_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""A module."""\nX = 1\n"""Of a step."""\nraise ValueError(f"{X} goes on here")\nY = "two words"\n'
    )
    assert sorted(texts(module)) == [(1, "A module.", True), (3, "Of a step.", True), (4, "{} goes on here", False)]
