"""What a Python process in tests does first: leave its work to a process that has PyTorch loaded, or explain hangs."""

from __future__ import annotations

import os

if "HVFREEZE_TEST_STANDING" in os.environ:
    from handover import hand_over

    hand_over()

if "HVFREEZE_TEST_TRACE_AFTER" in os.environ:
    import faulthandler

    faulthandler.dump_traceback_later(float(os.environ["HVFREEZE_TEST_TRACE_AFTER"]))
