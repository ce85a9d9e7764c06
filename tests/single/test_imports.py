from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hvfreeze.torch_imports import kept_for_good
from tests.program import ROOT


def test_what_is_imported_is_looked_at_neither_now_nor_later() -> None:
    code = (
        "import gc; from hvfreeze.torch_imports import kept_for_good\n"
        "before = gc.get_stats()\n"
        "with kept_for_good(): import numpy\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000, gc.get_stats() == before)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "True True True\n"


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


@pytest.mark.parametrize("command", [["predict", "nowhere", "image.png"], ["evaluate", "nowhere"], ["blocks", "none"]])
def test_commands_that_load_torch_spare_it_the_collector(command: list[str]) -> None:
    script = (
        "import gc, sys; from hvfreeze.cli import perform; from hvfreeze.errors import HvfreezeError\n"
        "try: perform(sys.argv[1:])\n"
        "except HvfreezeError: print('torch' in sys.modules, gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    said = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "True True True"
