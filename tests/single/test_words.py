"""Guides use the field's words: the private words of earlier versions do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.program import ROOT

PAGES = [
    "README.md",
    "docs/cache.md",
    "docs/clusters.md",
    "docs/data-and-models.md",
    "docs/freezing.md",
    "docs/internals/blocks.md",
    "docs/internals/cache.md",
    "docs/internals/developing.md",
    "docs/internals/exchange.md",
    "docs/internals/failures.md",
    "docs/internals/freezing.md",
    "docs/internals/heads.md",
    "docs/internals/kernel-head.md",
    "docs/internals/pipelines.md",
    "docs/internals/recipes.md",
    "docs/internals/strategies.md",
    "docs/networks.md",
    "docs/own-loop.md",
    "docs/reference/clusters.md",
    "docs/reference/data.md",
    "docs/reference/training-script.md",
    "docs/reliability.md",
    "docs/runs.md",
]
WORDS = {
    r"solv(e|es|ed|ing)|solutions?": "fit, fitted head",
    r"likeness(es)?": "kernel value",
    r"owed|what was left out": "error-feedback residual",
    r"mirror(ed)? images?": "horizontal flips",
    r"(a|the) look|looked at|looks? again": "gradient probe, probed",
    r"(?<!fine-)tun(e|es|ed|ing)": "fine-tune, fine-tuning",
    r"not finite": "NaN or Inf",
    r"of (one|your|its|their)('s)? own": "custom model, custom dataset, your training script",
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
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""A page and words in it that are no private words there, with the reason."""


def prose(text: str) -> str:
    """Return a page without code, generated parts and targets of links, which are named and written elsewhere."""
    for left_out in (r"(?ms)^ *```.*?^ *```$", r"(?s)<!-- (\S+) -->.*?<!-- /\1 -->", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(left_out, "", text)
    return re.sub(r"\s+", " ", text)


def private_words(text: str) -> Iterator[str]:
    """Yield every private word of a page's prose, with its neighbours and what to write."""
    plain = prose(text)
    for words, instead in WORDS.items():
        for found in re.finditer(rf"(?i)(?<![\w-])({words})(?![\w-])", plain):
            yield f"{plain[max(0, found.start() - 30) : found.end() + 30].strip()!r}: write {instead}"


@pytest.mark.parametrize("page", PAGES)
def test_a_guide_has_no_private_words(page: str) -> None:
    excepted = [words for (where, words) in EXCEPTIONS if where == page]
    assert [found for found in private_words((ROOT / page).read_text()) if not any(w in found for w in excepted)] == []


def test_every_exception_is_needed() -> None:
    found = {page: list(private_words((ROOT / page).read_text())) for page in {page for page, _ in EXCEPTIONS}}
    assert [(page, words) for page, words in EXCEPTIONS if not any(words in each for each in found[page])] == []


@pytest.mark.parametrize(
    "text", ["The head is solved.", "A fine-tuned block; a tuned one.", "It\ngoes on.", "5 000 images", "Tuning pays."]
)
def test_private_words_are_found(text: str) -> None:
    assert len(list(private_words(text))) == 1


@pytest.mark.parametrize("text", ["`--mirror images`", "fine-tuning", "[rows](solved.md)", "```\nanew\n```", "tunable"])
def test_code_links_and_parts_of_words_are_not_searched(text: str) -> None:
    assert list(private_words(text)) == []
