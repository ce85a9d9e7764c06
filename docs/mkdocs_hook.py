"""MkDocs' hook: files of the repository as pages, links between them, and the reference from the code.

Pages link to files as they lie in the repository, so that they can be read there too. On the site a link to a file that
is no page becomes the file's name.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

import hvfreeze
from hvfreeze.cli import build_parser
from hvfreeze.config.flags import HelpAll

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return the page of every file outside of docs/ that has one: path in the repository to path on the site."""
    found = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}
    for page in sorted((ROOT / "analysis" / "results").glob("*/README.md")):
        found[page.relative_to(ROOT).as_posix()] = f"results/{page.parent.name}.md"
    for kind in ("png", "svg"):
        for figure in sorted((ROOT / "analysis" / "results").glob(f"*/figures/*.{kind}")):
            found[figure.relative_to(ROOT).as_posix()] = figure.relative_to(ROOT / "analysis").as_posix()
    return found


PAGES = pages()
SOURCES = {site: path for path, site in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for path, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with the site's links and with the parts that are generated from the code."""
    site = page.file.src_uri
    source = SOURCES.get(site, f"docs/{site}")
    parts = FENCE.split(markdown)
    text = "".join(part if part.startswith("```") else with_links(part, source, site) for part in parts)
    return text.replace("<!-- command line -->", command_line()).replace("<!-- public names -->", public_names())


def with_links(text: str, source: str, site: str) -> str:
    """Return the text of the repository's file `source` with links for the page `site`."""

    def linked(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        found = normpath(join(dirname(source), path))
        uri = PAGES.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
        if uri is not None:
            return f"{picture}[{words}]({relpath(uri, dirname(site) or '.')}{hash_}{anchor})"
        if not picture and (ROOT / found).exists():
            return words if f"`{found}`" in words else f"{words} (`{found}`)"
        return match[0]

    return LINK.sub(linked, text)


def command_line() -> str:
    """Return every command with its flags, from the program's own parser."""
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    told = {action.dest: action.help for action in commands._choices_actions}
    return "\n\n".join(command(parser, told[name] or "") for name, parser in commands.choices.items())


def command(parser: argparse.ArgumentParser, text: str) -> str:
    """Return a command: what it does, its flags by group, and its examples; of `auto` the flags that its help shows."""
    for action in parser._actions if text and parser.prog.endswith("train") else ():
        action.help = getattr(action, "whole_help", action.help)
    lines = [f"## {parser.prog}", "", sentence(text)]
    for group in parser._action_groups:
        hidden = (argparse._HelpAction, HelpAll)
        known = [action for action in group._group_actions if not isinstance(action, hidden)]
        actions = [action for action in known if action.help != argparse.SUPPRESS]
        if not actions:
            continue
        titled = group.title not in ("options", "positional arguments")
        lines += ["", *([f"### {(group.title or '').capitalize()}", ""] if titled else []), "| | |", "|:---|:---|"]
        lines += [f"| `{flag(action)}` | {cell(action)} |" for action in actions]
    if parser.epilog:
        lines += ["", "```", parser.epilog.strip(), "```"]
    return "\n".join(lines)


def flag(action: argparse.Action) -> str:
    """Return a flag or an argument with what it takes."""
    values = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest)
    value = "" if action.nargs == 0 else str(values)
    return " ".join([*action.option_strings[-1:], value]).strip().replace("|", "\\|")


def cell(action: argparse.Action) -> str:
    """Return what a flag means, as a cell of a table."""
    text = (action.help or "").replace("%%", "%")
    return re.sub(r"([|<*_])", r"\\\1", text)


def sentence(text: str) -> str:
    """Return a text as a sentence."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def public_names() -> str:
    """Return where each public name's docstring is found, for mkdocstrings."""
    return "\n\n".join(f"::: hvfreeze.{hvfreeze._PUBLIC[name]}.{name}" for name in hvfreeze.__all__)
