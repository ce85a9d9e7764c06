"""A rank that times how fast the cache's own reader gives shuffled batches; started by `analysis.cache_reads`."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import mmap
import os
import time
from pathlib import Path

import torch

from analysis.benchmarks.ranks import Ranks
from analysis.benchmarks.rows.reading import SHAPES, FromCache, filled
from hvfreeze.comm.world import end_job_on_exception

ROWS = {"2k": 49_152, "64k": 2048}
"""About 100 MB of either."""
FLOAT_BYTES = 4
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.madvise.argtypes = LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def main() -> None:
    """Write what rank 0 gathers as JSON. Collective: every rank must call this."""
    parser = argparse.ArgumentParser(prog="python -m analysis.parts.read_rates", description=__doc__)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--part", type=int, required=True, help="one in so many of the rows")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder to fill, on the disk to be timed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks()
    end_job_on_exception(ranks.world)
    logging.disable(logging.WARNING)
    found = []
    for size, shape in SHAPES.items():
        num_rows, folder = ROWS[size] // options.part, options.scratch / size / str(ranks.rank)
        activations = filled(folder, shape=shape, num_rows=num_rows)
        reader, (path,) = FromCache(activations, num_rows), folder.glob("*.h5")
        reader.shuffle()
        reader.read()
        for repeat in range(options.repeats):
            drop(path)
            for state in ("cold", "warm"):
                share = resident(path)
                reader.shuffle()
                ranks.barrier()
                start = time.perf_counter()
                reader.read()
                taken = ranks.gather([time.perf_counter() - start, share])
                rate = ranks.size * num_rows / max(seconds for seconds, _ in taken)
                row = {"ranks": ranks.size, "row_bytes": torch.Size(shape).numel() * FLOAT_BYTES, "state": state}
                row |= {"repeat": repeat, "rows_per_second": round(rate)}
                found.append({**row, "resident": round(max(share for _, share in taken), 4)})
        activations.close()
    if ranks.rank == 0:
        options.out.write_text(json.dumps(found))
    ranks.close()


def drop(path: Path) -> None:
    """Take a file's pages out of the page cache; this process, which has it mapped, lets go of them first."""
    gc.collect()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {path.resolve()}"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if LIBC.madvise(first, last - first, mmap.MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), "madvise")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: Path) -> float:
    """Return the part of a file's pages that are in the page cache, 0-1."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        pages = -(-len(mapped) // mmap.PAGESIZE)
        there = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        code = LIBC.mincore(start, len(mapped), ctypes.addressof(there))
        gc.collect()
    if code != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in there) / pages


if __name__ == "__main__":
    main()
