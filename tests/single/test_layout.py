"""Who may import whom. The rule is ARCHITECTURE.md's; whoever breaks it learns here which import to take out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (
    ("errors", "imports", "named_code", "torch_compiler", "torchvision_shim", "plain_load"),
    ("config",),
    ("chain", "ranks", "cache", "data", "runs"),
    ("freezing", "prefix", "heads", "updates"),
    ("strategies", "applying", "own_loop"),
    ("training",),
    ("commands",),
    ("__main__",),
)
ALLOWED = {
    "applying": {"__init__", "errors", "named_code", "config", "chain", "data", "heads", "runs", "report"},
    "report": {"errors", "config", "runs"},
    "doctor": {"errors", "torchvision_shim"},
    "cache": {"errors"},
    "named_code": {"errors"},
    "plain_load": {"errors"},
    "torchvision_shim": {"torch_compiler"},
    "runs": {"errors", "config"},
    "updates": {"errors", "config"},
    "commands": {"errors", "applying", "cache", "config", "doctor", "imports", "report", "runs", "training"},
    "__main__": {"errors", "config", "commands", "imports", "ranks", "training"},
}
"""Stricter than the levels, or beside them."""
OWNERS = {
    "horovod": {"hvfreeze/ranks/", "hvfreeze/doctor/libraries.py", "hvfreeze/examples/"},
    "mpi4py": {"hvfreeze/ranks/", "hvfreeze/doctor/libraries.py"},
    "h5py": {"cache/file/", "hvfreeze/doctor/libraries.py"},
    "argparse": {
        "hvfreeze/examples/",
        "hvfreeze/config/flags.py",
        "hvfreeze/commands.py",
        "hvfreeze/doctor/libraries.py",
    },
}
"""Who may import a library; the doctor asks each in a process of its own what version it is."""
MOST_ROOMS = 9
MOST_LINES = 250
LONGER = {
    "cache/store/store.py": "one class, whose methods all look at the same rows and parts",
    "hvfreeze/ranks/reducer.py": "one class, a third of it fields and what they mean; its parts are in ranks/exchange",
}
"""Files with more lines, and why two would be worse."""
MOST_LINES_OF_A_FUNCTION = 60
"""But for its docstring."""

TO_BE_CUT: set[str] = set()

Sources = dict[str, str]


def sources() -> Sources:
    """Every module of the library: its path in the tree and its text."""
    found = [p for top in ("hvfreeze", "cache") for p in (ROOT / top).rglob("*.py")]
    paths = {p.relative_to(ROOT).as_posix(): p for p in found}
    return {name: p.read_text() for name, p in paths.items() if not name.startswith("hvfreeze/cache/")}


def sources_of_tests() -> Sources:
    """Every module of the tests."""
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}


def module_of(path: str) -> str:
    """The name under which a file is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"hvfreeze.{name}" if path.startswith("cache/") else name


def imports_of(text: str) -> Iterator[str]:
    """Every module that a text imports, also inside functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def home_of(module: str) -> str:
    """The folder, or file, of hvfreeze that a module belongs to."""
    return module.split(".")[1] if module.count(".") else "__init__"


def level_of(home: str) -> int | None:
    return next((number for number, level in enumerate(LEVELS) if home in level), None)


def may_import(home: str, other: str) -> bool:
    if home == other or home in ("examples", "__init__"):
        return True
    if home in ALLOWED:
        return other in ALLOWED[home]
    mine, theirs = level_of(home), level_of(other)
    return mine is not None and theirs is not None and theirs < mine


def violations(tree: Sources) -> set[str]:
    """Every import that the rule forbids, as `path -> module`."""
    found = set()
    known = {module_of(path) for path in tree}
    for path, text in tree.items():
        home = home_of(module_of(path))
        for module in imports_of(text):
            owners = OWNERS.get(module.split(".")[0])
            if owners is not None and not any(path.startswith(owner) for owner in owners):
                found.add(f"{path} -> {module}")
            inside = module in known and module.startswith("hvfreeze.")
            if inside and not may_import(home, home_of(module)):
                found.add(f"{path} -> {module}")
            sibling = home == "strategies" and module.startswith("hvfreeze.strategies.")
            if sibling and module in known and not is_shared_by_strategies(path, module):
                found.add(f"{path} -> {module}")
    return found


def is_shared_by_strategies(path: str, module: str) -> bool:
    """Whether `module` is a file of strategies/ that its strategies share, or a part of the very same strategy."""
    shared = ("strategy", "schedules", "cutting", "freezing", "caching", "normalising")
    name, mine = module.split(".")[2], path.removesuffix(".py").split("/")[2]
    return name in shared or name == mine


def test_nobody_imports_against_the_rule() -> None:
    assert violations(sources()) - TO_BE_CUT == set()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("hvfreeze/chain/planted.py", "from hvfreeze.ranks.world import World"),
        ("hvfreeze/ranks/planted.py", "from hvfreeze.chain.blocks import Chain"),
        ("hvfreeze/data/planted.py", "from hvfreeze.ranks import world"),
        ("hvfreeze/runs/planted.py", "import hvfreeze.freezing.voting.vote"),
        ("hvfreeze/config/planted.py", "from hvfreeze.data.views.augment import Augment"),
        ("hvfreeze/prefix/planted.py", "def f():\n    from hvfreeze.freezing.freezer import Freezer"),
        ("hvfreeze/freezing/planted.py", "from hvfreeze.prefix.caching import Caching"),
        ("hvfreeze/strategies/planted.py", "from hvfreeze.training.job import Job"),
        ("hvfreeze/strategies/planted.py", "from hvfreeze.strategies.replicas import Replicas"),
        ("hvfreeze/training/planted.py", "from hvfreeze.commands import perform"),
        ("cache/planted.py", "from hvfreeze.chain.blocks import Chain"),
        ("cache/planted.py", "import h5py"),
        ("hvfreeze/report/planted.py", "from hvfreeze.freezing.voting.vote import Decision"),
        ("hvfreeze/doctor/planted.py", "from hvfreeze.config.sections import Config"),
        ("hvfreeze/training/planted.py", "import horovod.torch as hvd"),
        ("hvfreeze/applying/planted.py", "from hvfreeze.freezing.freezer import Freezer"),
        ("hvfreeze/report/planted.py", "from hvfreeze.applying.card.contents import Card"),
        ("hvfreeze/strategies/planted.py", "from mpi4py import MPI"),
        ("hvfreeze/training/planted.py", "import argparse"),
    ],
)
def test_a_planted_violation_is_found(path: str, line: str) -> None:
    tree = sources()
    new = violations({**tree, path: line}) - violations(tree)
    assert {entry.split(" -> ")[0] for entry in new} == {path}


def test_no_file_imports_itself_in_a_circle() -> None:
    tree = sources()
    modules = {module_of(path): text for path, text in tree.items() if "__init__" not in path}
    graph = {name: {m for m in imports_of(text) if m in modules and m != name} for name, text in modules.items()}
    list(TopologicalSorter(graph).static_order())
    graph["hvfreeze.errors"] = {"hvfreeze.__main__"}
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


def test_no_folder_has_more_rooms_than_one_can_remember() -> None:
    rooms: dict[str, set[str]] = {}
    for path in sources():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            rooms.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    counts = {folder: len(inside - {"__init__.py"}) for folder, inside in rooms.items() if folder != "hvfreeze"}
    assert {folder: count for folder, count in counts.items() if count > MOST_ROOMS} == {}


def too_long(tree: Sources) -> set[str]:
    """Every file that is longer than a reader keeps in mind, and every function that is longer than a screen."""
    found = {path for path, text in tree.items() if len(text.splitlines()) > MOST_LINES}
    for path, text in tree.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                start = first.end_lineno if ast.get_docstring(node) else node.lineno
                header = first.lineno - node.lineno if ast.get_docstring(node) else 0
                assert node.end_lineno is not None and start is not None
                if header + node.end_lineno - start > MOST_LINES_OF_A_FUNCTION:
                    found.add(f"{path}: {node.name}")
    return found


def test_no_file_and_no_function_is_longer_than_one_reads_at_once() -> None:
    found = too_long({**sources(), **sources_of_tests()})
    assert found == set(LONGER), "part it by what it does; a name in LONGER that is not found can go"


def test_a_planted_long_file_and_a_long_function_are_found() -> None:
    function = "def f():\n" + '    """What it does.' + "\n" * MOST_LINES_OF_A_FUNCTION + '    """\n'
    line = "    x = 1\n"
    planted = {
        "short.py": function + line * (MOST_LINES_OF_A_FUNCTION - 1),
        "long.py": function + line * (MOST_LINES_OF_A_FUNCTION + 1),
        "longer.py": "\n" * (MOST_LINES + 1),
    }
    assert too_long(planted) == {"long.py: f", "longer.py"}


def test_every_folder_says_what_it_is() -> None:
    folders = {path: text for path, text in sources().items() if path.endswith("__init__.py")}
    silent = [path for path, text in folders.items() if not ast.get_docstring(ast.parse(text))]
    assert silent == []


def test_what_tests_and_workers_import_is_there() -> None:
    """Workers run in other processes, in slow tests: a name that has moved would be noticed late."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvfreeze."):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    inside = importlib.util.find_spec(f"{node.module}.{alias.name}") if is_folder(module) else None
                    assert hasattr(module, alias.name) or inside, f"{path}:{node.lineno}: {node.module} {alias.name}"


def is_folder(module: ModuleType) -> bool:
    return hasattr(module, "__path__")
