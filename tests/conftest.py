from __future__ import annotations

import gc
import os
import re
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import standing
from tests.program import contents

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, and so would be every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules stay until the end: looking through them for garbage would take a third of the time to import them.
gc.disable()

INITIALISE_MPI = ("mpi4py.MPI", "horovod.torch")
OWN, STANDING, SINGLE = range(3)
CORES_OF_A_JOB = 4
LATER = 10
"""Niceness of tests without ranks. At 5, ranks take 1.8 times as long; at 19, these tests starve beside other work."""
PARALLEL = Path(__file__).with_name("parallel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests: jobs of their own, beside which others find time; standing ranks, by their number; then others."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int, str]:
    if PARALLEL not in item.path.parents:
        return SINGLE, 0, ""
    given = getattr(item, "callspec", None)
    given = given.params if given else {}
    if "standing" in item.keywords:
        return STANDING, given["size"], given.get("start", "")
    return OWN, 0, ""


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals tests to processes: the tests of a file together, as they share runs.

    Where there are few cores, one process makes all tests with ranks, one job after the other; with more, several do.
    """
    from xdist.scheduler import LoadScopeScheduling

    at_once = max(1, len(os.sched_getaffinity(0)) // CORES_OF_A_JOB)

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path, size = nodeid.partition("::")[0], re.search(r"(\d)\]$", nodeid)
            job = int(size[1]) if size else zlib.crc32(path.encode())
            return f"ranks {job % at_once}" if path.startswith("tests/parallel/") else path

    return ByFile(config, log)


def pytest_sessionfinish() -> None:
    standing.end()


@pytest.fixture(autouse=True)
def ranks_stand_for_those_that_use_them(request: pytest.FixtureRequest) -> None:
    """Ends the job that stands before a test that starts ranks of its own or needs none: ranks that wait take time."""
    if "standing" not in request.keywords:
        standing.end()


@pytest.fixture(autouse=True)
def ranks_come_first(request: pytest.FixtureRequest) -> None:
    """Lowers the priority of a process that has come to tests without ranks.

    Ranks wait for each other by giving up their core in turn; beside tests of their own priority each turn takes long.
    """
    if PARALLEL not in request.path.parents and "PYTEST_XDIST_WORKER" in os.environ and os.nice(0) < LATER:
        os.nice(LATER - os.nice(0))


@pytest.fixture(autouse=True)
def this_process_stays_out_of_mpi() -> Iterator[None]:
    """Fails the test after which this process has loaded MPI: from then on it could start no ranks."""
    yield
    loaded = [name for name in INITIALISE_MPI if name in sys.modules]
    for name in loaded:
        del sys.modules[name]
    assert not loaded, f"{', '.join(loaded)} was imported by pytest itself; import it in a worker script only"


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
