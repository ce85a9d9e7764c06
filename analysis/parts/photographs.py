"""Photographs as phones make them, from small ones: enlarged, with noise, of several megapixels and megabytes.

`make_photographs` writes them to a folder with `large` and `small`, both {train,test}/CLASS, the latter with the same
images of 256 pixels. As a program it decodes all of them into memory:

    python -m analysis.parts.photographs FOLDER SIDE OUT
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvfreeze.data.data_sets import open_data
from hvfreeze.data.decoding import MemoryPixels
from hvfreeze.data.shards import evenly

QUALITY, NOISE = 92, 5.5
"""JPEG quality, and the noise's standard deviation of 255: a photograph of 12 megapixels has 3 to 4 MB."""
SMALL_SIDE, SMALL_QUALITY = 256, 90
ORIENTATION = 0x0112
TESTED = 5
"""One photograph of so many is a test image."""
MADE = "made.json"


def make_photographs(source: Path, out: Path, *, count: int, size: tuple[int, int]) -> None:
    """Make `count` photographs of `size` (width, height) from images in `source`/*/CLASS, unless they are there."""
    wanted = {"count": count, "size": list(size), "noise": NOISE}
    if (out / MADE).exists() and json.loads((out / MADE).read_text(encoding="utf-8")) == wanted:
        return
    paths = sorted(path for path in source.glob("*/*/*") if path.is_file())
    chosen = [paths[row] for row in evenly(np.arange(len(paths)), count)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(functools.partial(make_photograph, out=out, size=size), range(count), chosen))
    (out / MADE).write_text(json.dumps(wanted), encoding="utf-8")


def make_photograph(number: int, path: Path, *, out: Path, size: tuple[int, int]) -> None:
    """Write one photograph in both sizes."""
    place = Path("test" if number % TESTED == 0 else "train", path.parent.name, f"{number}.jpg")
    width, height = size
    with Image.open(path) as image:
        enlarged = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    shift = np.random.default_rng(number).integers(0, min(size), 2)
    noisy = enlarged + np.roll(noise(width, height), tuple(shift), (0, 1))[..., None]
    photograph = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    exif = Image.Exif()
    exif[ORIENTATION] = 1
    for kind in ("large", "small"):
        (out / kind / place).parent.mkdir(parents=True, exist_ok=True)
    photograph.save(out / "large" / place, quality=QUALITY, exif=exif)
    scale = min(1.0, SMALL_SIDE / min(size))
    small = photograph.resize((round(scale * width), round(scale * height)), Image.Resampling.BILINEAR)
    small.save(out / "small" / place, quality=SMALL_QUALITY)


@functools.cache
def noise(width: int, height: int) -> NDArray[np.int16]:
    """Return the noise of a sensor, (height, width)."""
    return np.random.default_rng(0).normal(0, NOISE, (height, width)).astype(np.int16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode all photographs of a folder at one side, and write the seconds; return 0."""
    folder, side, out = arguments or sys.argv[1:]
    splits = open_data("imagefolder", folder, image_size=int(side))
    start, used = time.perf_counter(), time.process_time()
    for image_set in (splits.train, splits.test):
        MemoryPixels(image_set, np.arange(len(image_set)), workers=len(os.sched_getaffinity(0)))
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - used}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
