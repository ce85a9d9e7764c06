from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from hvfreeze.allocator import SETTINGS, advice, keep_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not asked")
SCRIPT = """
import resource
{first}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    before = faults()
    for _ in range(4):
        b"1" * 2**26
print(faults() - before)
"""
PROGRAM = "import hvfreeze.__main__ as program; program.main = lambda: 0; program.program()"
SHORT = """
import threading, time
from hvfreeze import allocator
allocator.available_bytes = lambda: 0
allocator.keep_memory()
allocator.watch_memory()
while any(thread.name == "memory" for thread in threading.enumerate()):
    time.sleep(0.01)
"""
PAGES = 4 * 2**26 // os.sysconf("SC_PAGESIZE")
"""Pages that the second round allocates."""


def faults(first: str, **variables: str) -> int:
    """Return the page faults of objects for which others of their size have just been freed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)], env=kept | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_the_program_keeps_freed_memory_unless_the_environment_sets_the_allocator() -> None:
    assert faults(PROGRAM) < PAGES / 20
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")):
        assert faults(PROGRAM, **{name: value}) > PAGES * 0.9, name


def test_what_is_free_is_returned_once_less_is_available_than_the_process_has() -> None:
    assert faults(SHORT) > PAGES * 0.9
    assert faults(SHORT.replace("lambda: 0", "lambda: 2**50").replace("while any", "while False and any")) < PAGES / 20


def test_a_script_keeps_what_it_is_told_to_set() -> None:
    assert faults("import hvfreeze") > PAGES * 0.9, "importing the library changes no allocator"
    assert faults("import hvfreeze", **SETTINGS) < PAGES / 20


def test_the_line_for_scripts_says_what_to_set_until_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTINGS, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hvfreeze.allocator._kept", False)
    assert all(f"{name}={value}" in advice() for name, value in SETTINGS.items())
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert advice() == ""
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert advice() == ""
    keep_memory()
    assert advice() == ""
