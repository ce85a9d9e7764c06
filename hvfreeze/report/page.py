"""One static HTML page out of sections of text, tables and figures: no network, no script, any width, printable."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from hvfreeze.errors import RefusedError
from hvfreeze.report.tables import Table

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on the page: its files, from which the page takes a copy of the SVG."""

    caption: str
    svg: Path
    narrow_svg: Path | None = None
    """A version for narrow screens."""
    files: tuple[str, ...] = ()
    """Paths relative to the page, offered as links."""

    @property
    def source(self) -> str:
        """The figure as a data URI."""
        return data_uri(self.svg)

    @property
    def narrow_source(self) -> str:
        """The narrow version as a data URI, empty where there is none."""
        return data_uri(self.narrow_svg) if self.narrow_svg else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page under a heading."""

    heading: str
    text: tuple[str, ...] = ()
    """Paragraphs."""
    points: tuple[str, ...] = ()
    """A list, an entry each."""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    """Paragraphs in small type at the section's end."""


def data_uri(svg: Path) -> str:
    """Return an SVG file as a data URI."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode()


def write_page(
    title: str, sections: Sequence[Section], *, out: str | os.PathLike[str], refresh_seconds: int = 0
) -> Path:
    """Write `out`/index.html and return its path. All text is escaped.

    With `refresh_seconds` a browser that shows the page loads it again as often.

    Raises:
        RefusedError: the page cannot be written.
    """
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("report.html").render(title=title, sections=sections, refresh=refresh_seconds)
    path = Path(out) / "index.html"
    write_text(path, text)
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file, making its folder.

    Raises:
        RefusedError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
