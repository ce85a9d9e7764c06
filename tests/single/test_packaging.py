from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import hvfreeze

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "LICENSE",
    "hvfreeze",
    "cache",
    "launch",
    "analysis",
)
NOT_INSTALLED = {"cache", "launch", "analysis", "tests"}
WHERE = "import hvfreeze, hvfreeze.cache, hvfreeze.errors; print(hvfreeze.cache.__file__)"
BARE = (
    "from importlib.util import find_spec; print([n for n in ('cache', 'launch', 'analysis', 'tests') if find_spec(n)])"
)


def test_the_version_is_the_same_everywhere() -> None:
    assert re.findall(r'version="(.+?)"', (ROOT / "setup.py").read_text()) == [hvfreeze.__version__]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, as building leaves files behind."""
    target = tmp_path_factory.mktemp("sources")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results")
            )
        else:
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    python("setup.py", "-q", "sdist", "-d", str(folder), cwd=sources)
    subprocess.run(["tar", "xzf", str(next(folder.glob("hvfreeze-*.tar.gz")))], cwd=folder, check=True)
    unpacked = next(path for path in folder.glob("hvfreeze-*") if path.is_dir())
    python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), ".", cwd=unpacked)
    return next(folder.glob("hvfreeze-*.whl"))


def files_of(folder: Path) -> list[Path]:
    """Every module, template and setting below a folder."""
    suffixes = (".py", ".conf", ".html", ".typed")
    return [path for path in folder.rglob("*") if path.name.endswith(suffixes) and path.is_file()]


def python(*args: str, cwd: Path, **variables: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_wheel_of_the_source_distribution_holds_every_module_and_template_and_no_bare_names(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "hvfreeze/py.typed" in names and "hvfreeze/cache/__init__.py" in names
    tops = {name.split("/")[0] for name in names}
    assert not tops & NOT_INSTALLED and len(tops) == 2, tops  # hvfreeze and its metadata
    tree = {f"hvfreeze/{path.relative_to(ROOT / 'hvfreeze')}" for path in files_of(ROOT / "hvfreeze")}
    tree |= {f"hvfreeze/cache/{path.relative_to(ROOT / 'cache')}" for path in files_of(ROOT / "cache")}
    assert tree == {name for name in names if name.startswith("hvfreeze/")}


def test_installed_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    python("-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(site), str(wheel), cwd=tmp_path)
    assert python("-c", WHERE, cwd=tmp_path, PYTHONPATH=str(site)) == str(site / "hvfreeze/cache/__init__.py")
    assert {path.name for path in site.iterdir()} & NOT_INSTALLED == set()
    assert "hvfreeze.__main__:program" in next(site.glob("hvfreeze-*.dist-info/entry_points.txt")).read_text()


def test_editable_install_follows_the_tree_and_hides_the_bare_names(sources: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    options = ["-q", "--no-deps", "--no-build-isolation", "--ignore-installed", "--prefix", str(prefix)]
    python("-m", "pip", "install", *options, "-e", str(sources), cwd=tmp_path)
    site = next(prefix.glob("lib/python*/site-packages"))
    # -S keeps out the editable install of the tree under test; the libraries come back without their .pth files.
    start = f"import site, sys; site.addsitedir({str(site)!r}); "
    libraries = f"sys.path.append({sysconfig.get_path('purelib')!r}); "
    assert python("-S", "-c", start + BARE, cwd=tmp_path) == "[]"
    assert python("-S", "-c", start + libraries + WHERE, cwd=tmp_path) == str(sources / "hvfreeze/cache/__init__.py")


def test_installed_torch_and_horovod_are_the_pinned_ones() -> None:
    from importlib.metadata import version

    pins = dict(
        line.split("==")
        for line in (ROOT / "launch/requirements.txt").read_text().splitlines()
        if line.startswith(("torch", "hor"))
    )
    installed = {name: version(name).partition("+")[0] for name in pins}
    assert installed == pins
