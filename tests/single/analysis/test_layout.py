"""Who may import whom below analysis/, read from the sources."""

from __future__ import annotations

from pathlib import Path

from tests.single.test_layout import imports_of

ROOT = Path(__file__).resolve().parents[3]
LEVELS = (
    *("benchmarks", "benchmarks.rows", "sweeps"),
    *("parts.strategies", "parts.networks", "parts", ""),
)
"""Folders below analysis/, the lowest first; the commands themselves are the highest."""


def modules(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "results" not in path.parts]


def name_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def folder_of(module: str) -> str:
    """Return the folder below analysis/ that a module lies in, empty for the commands."""
    return module.removeprefix("analysis").strip(".").rpartition(".")[0]


def edges(root: Path) -> dict[str, set[str]]:
    """Return what each module below analysis/ imports of the others."""
    files = modules(root / "analysis")
    known = {name_of(path, root): path for path in files if path.name != "__init__.py"}
    return {
        name: {other for other in imports_of(path.read_text(encoding="utf-8")) if other in known} - {name}
        for name, path in known.items()
    }


def upward(found: dict[str, set[str]]) -> list[str]:
    """Return the imports that a folder may not make. The rows of the benchmark are used by nobody but its worker."""
    wrong = []
    for name, others in found.items():
        own = LEVELS.index(folder_of(name))
        wrong += [f"{name} -> {other}" for other in others if LEVELS.index(folder_of(other)) > own]
    return wrong


def circles(found: dict[str, set[str]]) -> list[str]:
    """Return the modules that can be reached from themselves."""
    left = dict(found)
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return sorted(left)


def test_folders_are_imported_downwards_and_no_module_reaches_itself() -> None:
    found = edges(ROOT)
    assert len(found) > 40
    assert upward(found) == []
    assert circles(found) == []


def test_the_library_and_the_cache_import_nothing_of_the_analysis() -> None:
    for folder in ("hvfreeze", "cache"):
        for path in modules(ROOT / folder):
            assert not [
                name for name in imports_of(path.read_text(encoding="utf-8")) if name.partition(".")[0] == "analysis"
            ], path
