"""One rank of `hvfreeze train` whose peak memory is kept: python -m analysis.parts.growth_images OUT train FLAGS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hvfreeze.__main__ import main as program
from hvfreeze.comm.resources import peak_memory_bytes


def main(out: str, words: list[str]) -> int:
    """Train, and write what it took to a file of this rank's own; return the exit code."""
    code = program(words)
    if code == 0:
        summary = json.loads(Path(out, "run", "summary.json").read_text(encoding="utf-8"))
        found = {"seconds": summary["seconds"], "peak_bytes": peak_memory_bytes()}
        found |= {"digest": summary["parameter_digest"], "accuracy": summary["test_accuracy"]}
        found |= {"exchanged_bytes": summary["allreduce_bytes"]}
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        Path(out, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
