from __future__ import annotations

import gc
import subprocess
import sys

from hvfreeze.ranks.machine.imports import kept_for_good
from tests.program import ROOT


def test_what_is_imported_is_looked_at_neither_now_nor_later() -> None:
    code = (
        "import gc; from hvfreeze.ranks.machine.imports import kept_for_good\n"
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
