"""Who may import whom. The rule is ARCHITECTURE.md's; whoever breaks it learns here which import to take out."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [
    level.split()
    for level in (
        "errors files wording memory allocator timing user_code imports torchvision_shim plain_load plain_yaml",
        "rules",
        "config",
        "settings",
        "metrics row_weights",
        "tasks",
        "model comm cache data runs",
        "freezing prefix heads optim",
        "strategies inference integration effects",
        "samples",
        "training",
        "cli",
        "__main__",
    )
]
ALLOWED = {
    home: set(others.split())
    for home, others in {
        "config": "errors wording user_code rules plain_yaml",
        "settings": "errors wording rules config",
        "inference": "__init__ errors user_code rules config plain_yaml model data heads metrics tasks runs "
        "report timing imports wording",
        "report": "errors config metrics runs wording",
        "doctor": "errors memory torchvision_shim wording",
        "allocator": "memory",
        "cache": "errors files wording",
        "user_code": "errors wording",
        "files": "errors",
        "plain_load": "errors",
        "plain_yaml": "",
        "torchvision_shim": "imports",
        "runs": "errors files imports rules config metrics wording plain_load plain_yaml",
        "optim": "errors config tasks",
        "cli": "errors wording inference cache config doctor imports report runs training",
        "__main__": "errors allocator config cli imports comm training",
    }.items()
}
"""Stricter than the levels, or beside them."""
OWNERS = {
    "horovod": {"hvfreeze/comm/", "hvfreeze/doctor/libraries.py", "hvfreeze/examples/"},
    "mpi4py": {"hvfreeze/comm/", "hvfreeze/doctor/libraries.py"},
    "h5py": {"cache/file/", "hvfreeze/doctor/libraries.py"},
    "argparse": {
        "hvfreeze/examples/",
        "hvfreeze/config/flags.py",
        "hvfreeze/cli.py",
        "hvfreeze/doctor/libraries.py",
        "hvfreeze/model/weight_files.py",
    },
}
"""Who may import a library; the doctor asks each in a process of its own what version it is.

Files of weights may hold the arguments of the program that trained them.
"""

STANDS_ON = {"local_sgd": "data_parallel", "subnets": "data_parallel", "rounds": "data_parallel"}
"""A strategy, or what several share -> the one that it is made of."""

Sources = dict[str, str]


@functools.cache
def sources() -> Sources:
    """Every module of the library: its path in the tree and its text."""
    found = [p for top in ("hvfreeze", "cache") for p in (ROOT / top).rglob("*.py")]
    paths = {p.relative_to(ROOT).as_posix(): p for p in found}
    return {name: p.read_text() for name, p in paths.items() if not name.startswith("hvfreeze/cache/")}


def module_of(path: str) -> str:
    """The name under which a file is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"hvfreeze.{name}" if path.startswith("cache/") else name


@functools.cache
def imports_of(text: str) -> list[str]:
    """Every module that a text imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def home_of(module: str) -> str:
    """The folder, or file, of hvfreeze that a module belongs to; settings of strategies are a layer of their own."""
    if re.fullmatch(r"hvfreeze\.strategies\.\w+\.settings(\..*)?", module):
        return "settings"
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
            if module.partition(".")[0] in ("analysis", "launch", "tests"):
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
    shared = (
        "base",
        "schedules",
        "build_parts",
        "compression_choice",
        "model_parallel",
        "rounds",
        "whole_replicas",
    )
    name, mine = module.split(".")[2], path.removesuffix(".py").split("/")[2]
    return name in shared or name == mine or name == STANDS_ON.get(mine)


def test_nobody_imports_against_the_rule() -> None:
    assert violations(sources()) == set()


PLANTED = {
    "hvfreeze/model/planted.py": "from hvfreeze.comm.world import World",
    "hvfreeze/data/planted.py": "from hvfreeze.comm import world",
    "hvfreeze/prefix/planted.py": "def f():\n    from hvfreeze.freezing.freezer import Freezer",
    "hvfreeze/freezing/planted.py": "from hvfreeze.prefix.features import Features",
    "hvfreeze/strategies/planted/settings.py": "from hvfreeze.freezing.vote import Voter",
    "hvfreeze/strategies/planted.py": "from hvfreeze.strategies.data_parallel import DataParallel",
    "hvfreeze/training/planted.py": "import horovod.torch as hvd",
    "hvfreeze/inference/planted.py": "from hvfreeze.freezing.freezer import Freezer",
    "cache/planted.py": "from hvfreeze.model.blocks import Chain",
    "cache/second_planted.py": "import h5py",
    "cache/third_planted.py": "from analysis.sweeps import sweep",
}


def test_a_planted_violation_is_found() -> None:
    new = violations({**sources(), **PLANTED}) - violations(sources())
    assert {entry.split(" -> ")[0] for entry in new} == set(PLANTED)


def test_no_file_imports_itself_in_a_circle() -> None:
    tree = sources()
    modules = {module_of(path): text for path, text in tree.items() if "__init__" not in path}
    graph = {name: {m for m in imports_of(text) if m in modules and m != name} for name, text in modules.items()}
    list(TopologicalSorter(graph).static_order())
    graph["hvfreeze.errors"] = {"hvfreeze.__main__"}
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


def test_what_workers_import_is_there() -> None:
    """Workers run in other processes, in slow tests: a name that has moved would be noticed late."""
    for path in sorted((ROOT / "tests" / "parallel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvfreeze."):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    inside = hasattr(module, "__path__") and importlib.util.find_spec(name)
                    assert hasattr(module, alias.name) or inside, f"{path}:{node.lineno}: {name}"


def test_no_test_replaces_the_clock_of_other_threads() -> None:
    """Tests replace a module's name `time`, not a function of the module that all threads share."""
    shared = re.compile(
        r"""(setattr|patch\.object)\(\s*([\w.]+\.)?(time|select), ["']|(setattr|patch)\(["'](time|select)\."""
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if shared.search(line)
    ]
    assert not found, f"set the attribute `time` of the module under test: {', '.join(found)}"
