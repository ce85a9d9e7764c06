"""One rank of a program, whose resources are written to OUT/RANK.json; --help has the choices.

python -m analysis.parts.measured_rank OUT hvfreeze.__main__ train FLAGS...
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from hvfreeze.__main__ import leave_cores
from hvfreeze.allocator import keep_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, write what it took, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.parts.measured_rank", description=__doc__)
    parser.add_argument("--default-allocator", action="store_true", help="do not keep freed memory")
    parser.add_argument("--whole-images", action="store_true", help="decode JPEG files at their full size")
    parser.add_argument("out", type=Path)
    parser.add_argument("module", help="with a function main, which takes the words")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not options.default_allocator:
        keep_memory()
    if options.whole_images:
        decode_whole()
    elif options.module == "hvfreeze.__main__":
        leave_cores(options.words)
    code: int = importlib.import_module(options.module).main(options.words)
    from hvfreeze.comm.resources import peak_memory_bytes

    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {"kernel_seconds": used.ru_stime, "user_seconds": used.ru_utime, "peak_bytes": peak_memory_bytes()}
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    (options.out / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return code


def decode_whole() -> None:
    """Decode every JPEG file at its full size."""
    from hvfreeze.data import reading

    reading.WHOLE_SIDE = sys.maxsize


if __name__ == "__main__":
    sys.exit(main())
