from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvfreeze import __main__, cli
from hvfreeze.imports import imported_beside, kept_for_good
from tests.program import ROOT, call


def test_what_is_imported_is_looked_at_neither_now_nor_later() -> None:
    code = (
        "import gc; from hvfreeze.imports import kept_for_good\n"
        "before = gc.get_stats()\n"
        "with kept_for_good(): import numpy\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000, gc.get_stats() == before)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "True True True\n"


def test_a_usage_error_is_reported_before_torch_is_imported() -> None:
    code = (
        "import sys; from hvfreeze.__main__ import main\n"
        "print([main(words.split()) for words in ('train --cut 1', 'auto', 'train --lr -1')], 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[2, 2, 2] False\n"


@pytest.mark.parametrize(
    ("command", "given", "policy"), [("predict", "", "passive"), ("predict", "active", "active"), ("train", "", "")]
)
def test_threads_of_torch_that_wait_leave_the_cores_to_decoding(command: str, given: str, policy: str) -> None:
    code = (
        "import os, sys; from hvfreeze import __main__ as program\n"
        f"program.main, sys.argv = lambda: 0, ['hvfreeze', '{command}']\n"
        "program.program(); print('torch' in sys.modules, os.environ.get('OMP_WAIT_POLICY', ''))"
    )
    variables = {**os.environ, "OMP_WAIT_POLICY": given}
    if not given:
        del variables["OMP_WAIT_POLICY"]
    told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, env=variables)
    assert told.split() == ["False", policy][: 1 + bool(policy)]


def test_where_nothing_is_left_to_import_nothing_is_kept() -> None:
    before = gc.get_freeze_count()
    with kept_for_good():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with kept_for_good():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "command", ["predict nowhere image.png", "evaluate nowhere", "export nowhere", "blocks none", "auto nowhere"]
)
def test_commands_that_load_torch_spare_it_the_collector(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        entered.append(1)
        yield

    for module in (cli, __main__):
        monkeypatch.setattr(module, "kept_for_good", kept)
    assert call(*command.split()).returncode in (2, 3) and entered


def test_a_module_is_imported_while_something_else_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_one.py").write_text("import builtins; builtins.met.wait(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    met = threading.Event()
    monkeypatch.setattr(builtins, "met", met, raising=False)
    with imported_beside("slow_one"):
        # Were it imported before what is inside, nobody would have set this.
        met.set()
    assert "slow_one" in sys.modules
    del sys.modules["slow_one"]


def test_an_error_is_left_to_whoever_imports_the_module_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with imported_beside("broken_one"):
        pass
    with pytest.raises(ImportError, match="not here"):
        importlib.import_module("broken_one")


SWALLOWING = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    half = True
whole = True
"""


def test_an_interrupt_that_an_import_would_swallow_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swallowing_one.py").write_text(SWALLOWING)
    monkeypatch.syspath_prepend(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), kept_for_good():
        importlib.import_module("swallowing_one")
    module = sys.modules.pop("swallowing_one")
    assert hasattr(module, "whole") and not hasattr(module, "half")
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with kept_for_good():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
