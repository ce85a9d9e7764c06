from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel import pool
from tests.parallel.mpirun import environment
from tests.program import contents

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, and so would be every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

INITIALISE_MPI = ("mpi4py.MPI", "horovod.torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fresh", action="store_true", help="let every rank load PyTorch itself, which takes far longer")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fresh"):
        os.environ[pool.FRESH] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the tests of a file in one process, where they share runs and nodes, but for those that share nothing."""
    for item in items:
        if item.path.name != "test_checks.py":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_sessionfinish() -> None:
    pool.end()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets the program, where it is started with this process's variables, be a copy; see tests/parallel/pool.py."""
    for name, value in environment({}, out=tmp_path, timeout=200, ranks=1).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def this_process_stays_out_of_mpi() -> Iterator[None]:
    """Fails the test after which this process has loaded MPI: from then on it could start no ranks."""
    yield
    loaded = [name for name in INITIALISE_MPI if name in sys.modules]
    for name in loaded:
        del sys.modules[name]
    assert not loaded, f"{', '.join(loaded)} was imported by pytest itself; import it in a worker script only"


@pytest.fixture(autouse=True)
def standing_processes_stay() -> Iterator[None]:
    """Fails the test that ends a standing process, as one does that closes a descriptor that is not its own."""
    yield
    pool.check()


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory that nothing may be written to."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    yield folder
    after = contents(folder)
    # Names, for the bytes of a checkpoint would hide every other message.
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name]] == []
