"""What is written for readers: links lead somewhere, the site lists every page, and public names are documented."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hvfreeze
from hvfreeze.config.flags import EXAMPLES
from tests.parallel.test_checks import cases
from tests.program import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "launch" / "README.md", *sorted(DOCS.rglob("*.md"))]
OUTSIDE = {"index.md", "architecture.md", "changelog.md"}
"""Pages of the site that are made of files outside of docs/."""
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


def test_every_link_between_files_leads_somewhere() -> None:
    lost = []
    for page in PAGES:
        text = CODE.sub(lambda code: "`code`" if not code[0].startswith("```") else "", page.read_text())
        for target in LINK.findall(text):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            if ":" in path:
                continue
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
                lost.append((name_of(page), target))
    assert lost == []


def test_every_file_that_is_named_exists() -> None:
    name = re.compile(r"`((?:hvfreeze|cache|analysis|launch|tests|docs)/[\w./-]*)`")
    named = [(name_of(page), file) for page in PAGES for file in name.findall(page.read_text())]
    assert [(page, file) for page, file in named if not (ROOT / file).exists()] == []


def test_the_site_lists_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .+: (\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | OUTSIDE


def test_every_figure_is_shown_on_a_page() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if ":" not in target
    }
    assert [figure.name for figure in sorted((DOCS / "figures").iterdir()) if figure not in shown] == []


def test_the_readme_names_the_first_command_and_the_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme and "make demo" in readme


def test_every_mpirun_command_of_a_guide_and_of_the_help_leaves_ranks_all_cores() -> None:
    """Open MPI binds each of two ranks to one core unless it is told otherwise."""
    lines = [line for text in (EXAMPLES, *(page.read_text() for page in PAGES)) for line in text.splitlines()]
    assert [line for line in lines if re.match(r"\s*mpirun -np", line) and "--bind-to none" not in line] == []
    assert set(re.findall(r"--freeze (\S+)", EXAMPLES)) == {"coherence", "static"}


def members(name: str) -> Iterator[tuple[str, Any]]:
    """A public name and, of a class, its public methods and properties that are written here."""
    value = getattr(hvfreeze, name)
    yield name, value
    for own in vars(value) if inspect.isclass(value) else ():
        member = inspect.getattr_static(value, own)
        member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if not own.startswith("_") and inspect.isfunction(member):
            yield f"{name}.{own}", member


def test_every_public_name_and_method_has_a_docstring_of_its_own() -> None:
    for name in hvfreeze.__all__:
        # A dataclass without one is given its signature.
        own = rf"({name}\(.*\))?$"
        assert [path for path, value in members(name) if re.match(own, value.__doc__ or "", re.DOTALL)] == []


def test_the_guide_tells_what_a_script_needs_first() -> None:
    guide = (DOCS / "own-loop.md").read_text()
    first = {"DistributedOptimizer", "CachedLoader", "FreezeConfig", "freeze_by_vote", "load", "Chain", "Freezer"}
    assert [name for name in sorted(first) if name not in guide] == []


def test_each_guarantee_has_tests_that_make_test_runs() -> None:
    guarantees = (DOCS / "reliability.md").read_text().partition("## Guarantees")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d)\. .*", (DOCS / "internals" / "developing.md").read_text(), re.MULTILINE)
    assert rows == re.findall(r"^(\d)\. ", guarantees, re.MULTILINE)
    often = {str(case.id) for case in cases() if not case.marks}
    for line in (DOCS / "internals" / "developing.md").read_text().splitlines():
        if re.match(r"\| \d\. ", line):
            named = re.findall(r"`([^`]+)`", line)
            files = [name for name in named if name.endswith(".py")]
            assert files and all((ROOT / name).exists() for name in files), line
            assert len(files) < len(named) and set(named) - set(files) <= often, line
