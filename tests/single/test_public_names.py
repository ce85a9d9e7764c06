from __future__ import annotations

import subprocess
import sys

import hvfreeze
from hvfreeze.errors import UsageError
from tests.program import ROOT


def test_public_names_can_be_listed_and_had() -> None:
    assert set(hvfreeze.__all__) <= set(dir(hvfreeze))
    assert {"Freezer", "Reducer", "UsageError", "cut_into_blocks", "__version__"} <= set(dir(hvfreeze))
    assert hvfreeze.UsageError is UsageError
    for name in hvfreeze.__all__:
        if name != "open_world":
            assert getattr(hvfreeze, name).__name__ == name


def test_listing_public_names_loads_nothing() -> None:
    code = "import sys, hvfreeze; dir(hvfreeze); print(sorted({'torch', 'numpy', 'h5py'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
