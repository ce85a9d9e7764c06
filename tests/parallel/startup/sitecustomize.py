"""On every rank's PYTHONPATH in tests: shortly before the deadline it prints all stacks, to explain a hang."""

from __future__ import annotations

import faulthandler
import os

if "HVFREEZE_TEST_TRACE_AFTER" in os.environ:
    faulthandler.dump_traceback_later(float(os.environ["HVFREEZE_TEST_TRACE_AFTER"]))
