"""One bit of a cache file is flipped, anywhere: it is noticed, or makes no difference."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.format import NAMES
from hvfreeze.cache.file.hdf5 import find_regions, make_frame
from hvfreeze.cache.file.reader import ActivationFile
from tests.single.cache.material import run_in_child, write_file

NUM_FLIPS = 300


def read_flipped(path: Path, flips: list[tuple[int, int]], first: int) -> Iterator[str]:
    """Read copies of a file, each with one bit flipped; yield what became of each."""
    original, file = path.read_bytes(), ActivationFile(path)
    rows = torch.arange(len(file.keys))
    expected = file.keys.tobytes(), file.read(rows)
    victim = path.with_name("activations-" + "0" * 16 + "-0of1.h5")
    for number, (position, bit) in list(enumerate(flips))[first:]:
        yield f"{number} begins"
        damaged = bytearray(original)
        damaged[position] ^= 1 << bit
        victim.write_bytes(damaged)
        try:
            flipped = ActivationFile(victim)
            flipped.verify()
            same = (flipped.keys.tobytes(), flipped.manifest) == (expected[0], file.manifest)
            yield f"{number} {'same' if same and torch.equal(flipped.read(rows), expected[1]) else 'WRONG'}"
        except CacheFault as fault:
            yield f"{number} {'refused' if str(victim) in str(fault) else 'UNNAMED'}"


def flip_results(path: Path, flips: list[tuple[int, int]]) -> list[str]:
    """One word per flip: refused, same, crashed, WRONG or UNNAMED.

    The HDF5 library may crash on a damaged file, which counts as noticed: another process reads them.
    """
    results: dict[int, str] = {}
    while len(results) < len(flips):
        status, lines = run_in_child(partial(read_flipped, path, flips, len(results)))
        words = [line.split() for line in lines]
        results |= {int(number): word for number, word in words if word != "begins"}
        begun = [int(number) for number, word in words if word == "begins"]
        assert begun and (status == 0 or os.WIFSIGNALED(status))
        if status:
            results.setdefault(begun[-1], "crashed")
    return [results[number] for number in range(len(flips))]


def test_no_bit_flip_anywhere_in_a_file_is_used_silently(tmp_path: Path) -> None:
    path = write_file(tmp_path, num_rows=12)
    _, regions = find_regions(path, names=NAMES)
    manifest = ActivationFile(path).manifest
    payload = [at for r in regions.values() for at in range(r.offset, r.offset + r.nbytes)]
    extents = make_frame(manifest.datasets(), manifest.attributes()).extents
    metadata = [at for offset, content in extents.items() for at in range(offset, offset + len(content))]
    size, draw = path.stat().st_size, random.Random(0)
    places = [draw.choice(draw.choice([payload, metadata, range(size)])) for _ in range(NUM_FLIPS)]
    results = flip_results(path, [(place, draw.randrange(8)) for place in places])
    counts = {word: results.count(word) for word in sorted(set(results))}
    assert set(counts) <= {"refused", "same", "crashed"}, counts
    assert counts["refused"] > NUM_FLIPS // 2
    # A flip inside of a dataset cannot go unnoticed: all of their bytes are under a digest, or are one.
    inside = set(payload)
    assert all(word == "refused" for place, word in zip(places, results, strict=True) if place in inside)
