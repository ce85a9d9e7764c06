"""One bit of a cache file is flipped, anywhere: it is noticed, or makes no difference."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from hvfreeze.cache.file.format import NAMES
from hvfreeze.cache.file.hdf5 import find_regions, make_frame
from hvfreeze.cache.file.reader import ActivationFile
from tests.single.cache.material import write_file

ROOT = Path(__file__).parents[3]


NUM_FLIPS = 400


# Reads copies of a file, each with one bit flipped, and says what became of each. It runs by itself because the HDF5
# library may crash on a damaged file, which counts as noticed.
FLIPPER = """
import sys
from pathlib import Path
import torch
from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.reader import ActivationFile

path, first = Path(sys.argv[1]), int(sys.argv[2])
flips = [tuple(map(int, pair.split(":"))) for pair in sys.argv[3].split(",")]
original = path.read_bytes()
file = ActivationFile(path)
file.verify()
rows = torch.arange(len(file.keys))
expected = file.keys.tobytes(), file.read(rows)
victim = path.with_name("activations-" + "0" * 16 + "-0of1.h5")
for number, (position, bit) in list(enumerate(flips))[first:]:
    print(number, "begins", flush=True)
    damaged = bytearray(original)
    damaged[position] ^= 1 << bit
    victim.write_bytes(damaged)
    try:
        file = ActivationFile(victim)
        file.verify()
        same = (file.keys.tobytes(), file.manifest) == (expected[0], ActivationFile(path).manifest)
        print(number, "same" if same and torch.equal(file.read(rows), expected[1]) else "WRONG", flush=True)
    except CacheFault as fault:
        print(number, "refused" if str(victim) in str(fault) else "UNNAMED", flush=True)
"""


def flip_results(path: Path, flips: list[tuple[int, int]]) -> list[str]:
    """One word per flip: refused, same, crashed, WRONG or UNNAMED."""
    results: dict[int, str] = {}
    pairs = ",".join(f"{position}:{bit}" for position, bit in flips)
    while len(results) < len(flips):
        command = [sys.executable, "-c", FLIPPER, str(path), str(len(results)), pairs]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        lines = [line.split() for line in done.stdout.splitlines()]
        results |= {int(number): word for number, word in lines if word != "begins"}
        begun = [int(number) for number, word in lines if word == "begins"]
        assert done.returncode <= 0 and begun, done.stderr
        if done.returncode < 0:
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
