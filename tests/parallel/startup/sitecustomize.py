"""What a Python process in tests does first: see to it that a hang is explained."""

from __future__ import annotations

import os

if "HVFREEZE_TEST_TRACE_AFTER" in os.environ:
    import faulthandler

    faulthandler.dump_traceback_later(float(os.environ["HVFREEZE_TEST_TRACE_AFTER"]))
