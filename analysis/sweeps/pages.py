"""Pages: Markdown that is written by hand, in analysis/pages, with numbers from the kept runs.

pages/NAME.md          becomes RESULTS/NAME/README.md
pages/docs/PART.md     becomes what stands between the markers of PART in README.md or on a page of docs/

In a page `{{ ... }}` is an expression of Jinja. Names are those of `Results` for the experiment of that name, what the
page's own module gives, and the units below. A claim is a line `- **Question?** Answer.`, with **(negative)** before it
where the whole interval lies on the wrong side; docs/results.md lists the claims of all pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from analysis.sweeps.kept import publish
from analysis.sweeps.statistics import shown, signed_points
from hvfreeze.report.figures import STYLE
from hvfreeze.report.tables import factor, megabytes, number, percent, seconds
from hvfreeze.wording import plural

PAGES = Path(__file__).resolve().parents[1] / "pages"
CLAIM = re.compile(r"- (?P<mark>\*\*\([a-z ]+\)\*\* )?\*\*(?P<question>[^*]*\?)\*\* (?P<text>.*)")

Words = Mapping[str, Any]
"""The names that a page's expressions may use."""


def milliseconds(value: float) -> str:
    """Return seconds as milliseconds."""
    return f"{1000 * value:.0f} ms"


def bare(text: str) -> str:
    """Return a difference in points without the word."""
    return text.replace(" points", "")


UNITS: Words = {
    each.__name__: each
    for each in (shown, percent, seconds, milliseconds, factor, megabytes, number, signed_points, plural, bare)
}


@dataclass(frozen=True)
class Page:
    """A page of results: what its template may name, and its figures, by the folder of all results."""

    name: str
    words: Callable[[Path], Words]
    drawings: Callable[[Path], Mapping[str, Figure]] = lambda root: {}

    def title(self) -> str:
        """Return the first line."""
        return (PAGES / f"{self.name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

    def text(self, root: Path) -> str:
        """Return README.md."""
        return render(self.name, self.words(root))

    def draw(self, root: Path, folder: Path) -> list[Path]:
        """Write the figures below a folder and return their paths."""
        found = {folder / "figures" / f"{name}.svg": figure for name, figure in self.drawings(root).items()}
        for path, figure in found.items():
            save_figure(figure, path)
        return list(found)

    def write(self, root: Path, folder: Path | None = None) -> None:
        """Write page and figures into a folder, that of the results where none is given."""
        folder = folder or root / self.name
        self.draw(root, folder)
        publish(folder / "README.md", self.text(root))


def render(name: str, words: Words) -> str:
    """Return a page's text; an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    return environment.get_template(f"{name}.md").render({**UNITS, **words})


def claims(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield mark, question and answer of a page's claims."""
    for line in text.splitlines():
        if match := CLAIM.fullmatch(line):
            yield (match["mark"] or ""), match["question"], match["text"]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
