"""Writes all pages of results, and the numbers of README.md and docs/ between their markers; `--check` only compares.

python -m analysis.summary [--check]
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from analysis.experiments import PAGES
from analysis.parts import guides
from analysis.sweeps.kept import RESULTS, publish
from analysis.sweeps.pages import PAGES as TEMPLATES
from analysis.sweeps.pages import Words, claims, render
from hvfreeze.errors import HvfreezeError, RefusedError

README = Path(__file__).resolve().parents[1] / "README.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare the pages; return 0 when they agree with the results, 3 when not."""
    parser = argparse.ArgumentParser(prog="python -m analysis.summary", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where pages and results disagree")
    options = parser.parse_args(arguments)
    try:
        results = {RESULTS / name / "README.md": render(name, words_of(name)) for name in PAGES}
        wanted = {**results, **guides_with(parts(results), README)}
        changed = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        if options.check and changed:
            listed = ", ".join(map(str, changed))
            raise RefusedError(f"{listed}: not what the results say; run python -m analysis.summary")
    except HvfreezeError as error:
        print(f"summary: error: {error}", file=sys.stderr)
        return error.exit_code
    for path in changed:
        publish(path, wanted[path])
    return 0


@functools.cache
def words_of(name: str) -> Words:
    """Return the words of a page of results, which other pages use too."""
    words: Words = PAGES[name].words(RESULTS)
    return words


def parts(pages: Mapping[Path, str]) -> dict[str, str]:
    """Return what stands between the markers of each part; `pages` are those of results."""

    def of(name: str) -> SimpleNamespace:
        return SimpleNamespace(**words_of(name))

    def claims_of(name: str) -> Iterator[tuple[str, str, str]]:
        """Yield the claims of a page; one that no program of this source makes is read from its file."""
        path = RESULTS / name / "README.md"
        return claims(pages[path] if path in pages else path.read_text(encoding="utf-8"))

    def rows(*names: str) -> str:
        return "\n".join(
            f"| [{question}](analysis/results/{name}/README.md) | {mark}{text} |"
            for name in names
            for mark, question, text in claims_of(name)
        )

    def told(name: str, *beginnings: str) -> str:
        chosen = [each for each in claims_of(name) if each[1].startswith(beginnings)]
        return "\n".join(f"- {mark}**{question}** {text}" for mark, question, text in chosen)

    def answer(name: str) -> str:
        ((_, _, text),) = claims_of(name)
        return text

    words: Words = {"of": of, "rows": rows, "told": told, "answer": answer, **guides.words(RESULTS)}
    return {path.stem: render(f"docs/{path.stem}", words).rstrip("\n") for path in (TEMPLATES / "docs").glob("*.md")}


def guides_with(parts: Mapping[str, str], readme: Path) -> dict[Path, str]:
    """Return the texts of README and of every page in docs/, with the parts between their markers.

    Raises:
        RefusedError: the markers of a part are on no page, on several, or more than once.
    """
    paths = [readme, *sorted((readme.parent / "docs").rglob("*.md"))]
    pages = {path: path.read_text(encoding="utf-8") for path in paths}
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        holding = [path for path, text in pages.items() for _ in range(text.count(begin))]
        if len(holding) != 1 or end not in pages[holding[0]].partition(begin)[2]:
            where = ", ".join(map(str, holding)) or "none"
            raise RefusedError(
                f"<!-- {name} --> and behind it <!-- /{name} --> must stand once in README.md and the pages of docs/; "
                f"found in: {where}"
            )
        (page,) = holding
        before, _, rest = pages[page].partition(begin)
        up = "../" * (len(page.relative_to(readme.parent).parts) - 1)
        pages[page] = f"{before}{begin}{part.replace('](analysis/', f']({up}analysis/')}{end}{rest.partition(end)[2]}"
    return pages


if __name__ == "__main__":
    sys.exit(main())
