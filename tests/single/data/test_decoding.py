"""Pixels: the same bits in memory and streamed; errors come out; threads end; hints cost little and bind no one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hvfreeze.data import decoding as pixels_module
from hvfreeze.data.data_sets import ImageSet, open_data
from hvfreeze.data.decoding import MemoryPixels, StreamedPixels, load_pixels
from hvfreeze.data.images import ArraySource
from hvfreeze.errors import RefusedError

NUM = 200
IMAGE_BYTES = 3 * 8 * 8


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("decode"):
            thread.join()
    assert threading.active_count() <= before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for part, num in (("train", NUM // 2), ("test", 1)):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(num):
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number:03}.png")
    return tmp_path


@pytest.fixture
def images(root: Path) -> ImageSet:
    return open_data("imagefolder", root).train


class Counted:
    """Stands for a data set, notes which samples are decoded, and decodes none while its gate is closed."""

    def __init__(self, images: ImageSet) -> None:
        self.images, self.decoded = images, list[int]()
        self.image_shape = images.image_shape
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return len(self.images)

    def decode(self, sample_id: int) -> np.ndarray:
        self.gate.wait()
        self.decoded.append(sample_id)
        return self.images.decode(sample_id)


def batches_of(seed: int, *, num: int = 12, size: int = 16) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).permutation(NUM)[: num * size].reshape(num, size))


@pytest.mark.parametrize("workers", [1, 3])
def test_streamed_pixels_are_those_in_memory_bit_for_bit(images: ImageSet, workers: int) -> None:
    everything = np.arange(NUM)
    memory = load_pixels(images, everything, budget_bytes=NUM * IMAGE_BYTES, workers=workers)
    stream = load_pixels(images, everything, budget_bytes=NUM * IMAGE_BYTES - 1, workers=workers)
    assert isinstance(memory, MemoryPixels)
    assert isinstance(stream, StreamedPixels)
    for epoch in range(2):
        stream.prefetch(batches_of(epoch))
        for batch in batches_of(epoch):
            fetched = stream.fetch(batch)
            assert (fetched.shape, fetched.dtype) == ((16, 3, 8, 8), torch.uint8)
            assert torch.equal(fetched, memory.fetch(batch))
            np.testing.assert_array_equal(fetched[3].numpy(), images.decode(int(batch[3])))


def test_memory_holds_the_ranks_samples_only_and_tells_when_asked_for_others(images: ImageSet) -> None:
    counted = Counted(images)
    shard = np.arange(1, NUM, 2)
    memory = MemoryPixels(counted, shard, workers=2)  # type: ignore[arg-type]
    assert sorted(counted.decoded) == shard.tolist()
    assert memory.fetch(shard[[5, 0, 5]]).shape == (3, 3, 8, 8)
    assert memory.fetch(np.empty(0, dtype=np.int64)).shape == (0, 3, 8, 8)
    with pytest.raises(KeyError, match="sample 4 is not among"):
        memory.fetch(np.array([1, 4]))
    assert sorted(counted.decoded) == shard.tolist()


def test_images_that_an_array_holds_are_neither_copied_nor_streamed() -> None:
    digits = open_data("digits").train
    assert isinstance(digits.source, ArraySource)
    shard = np.arange(1, len(digits), 2)
    memory = load_pixels(digits, shard, budget_bytes=0, workers=1)
    assert isinstance(memory, MemoryPixels) and memory._pixels.data_ptr() == digits.source.pixels.ctypes.data
    np.testing.assert_array_equal(memory.fetch(shard[[7]])[0].numpy(), digits.decode(15))
    with pytest.raises(KeyError, match="sample 4 is not among"):
        memory.fetch(np.array([1, 4]))
    smaller = open_data("digits", image_size=16).train
    assert isinstance(load_pixels(smaller, shard, budget_bytes=0, workers=1), StreamedPixels), "they are resized"


@pytest.mark.parametrize(
    ("plan", "fetched"),
    [(range(12), range(12)), ([*range(12), *range(12)], [*range(12), *range(12)]), (range(12), [8, 9, 10, 11])],
    ids=["in order", "once a view", "after a jump"],
)
def test_announced_batches_are_decoded_a_few_ahead_and_each_once(
    images: ImageSet, plan: Sequence[int], fetched: Sequence[int]
) -> None:
    counted, batches = Counted(images), batches_of(0)
    stream = StreamedPixels(counted, workers=2)  # type: ignore[arg-type]
    stream.prefetch([batches[place] for place in plan])
    for number, place in enumerate(fetched, start=1):
        stream.fetch(batches[place])
        assert len(stream._started) == min(pixels_module._BATCHES_AHEAD, len(fetched) - number)
    skipped = set(np.concatenate(batches[4:8])) if fetched[0] else set()
    assert not skipped & set(counted.decoded)
    if not skipped:
        assert sorted(counted.decoded) == sorted(np.concatenate([batches[place] for place in plan]))


def test_batches_outside_the_hint_or_behind_it_are_decoded_all_the_same(images: ImageSet) -> None:
    batches, other = batches_of(0), np.array([7, 3, 7])
    memory = MemoryPixels(images, np.arange(NUM), workers=1)
    stream = StreamedPixels(images, workers=2)
    for ids in (other, batches[0]):
        assert torch.equal(stream.fetch(ids), memory.fetch(ids))
    stream.prefetch(batches)
    for ids in (batches[5], other, batches[2], batches[6], batches[6], batches[11]):
        assert torch.equal(stream.fetch(ids), memory.fetch(ids))
    stream.prefetch(batches_of(1))
    for ids in (batches_of(1)[0], batches[0]):
        assert torch.equal(stream.fetch(ids), memory.fetch(ids))


@pytest.mark.parametrize("place", [0, 1])
def test_a_corrupt_image_is_named_at_load_in_memory_and_at_its_fetch_when_streamed(root: Path, place: int) -> None:
    images = open_data("imagefolder", root).train
    # Behind an intact header, so that opening the data set does not find it.
    for name in ("a/050.png", "b/070.png"):
        path = root / "train" / name
        path.write_bytes(path.read_bytes()[:-60])
    expected = r"a/050.png is not an intact image"
    with pytest.raises(RefusedError, match=expected):
        MemoryPixels(images, np.arange(NUM), workers=2)
    MemoryPixels(images, np.setdiff1d(np.arange(NUM), [50, 170]), workers=2)
    stream = StreamedPixels(images, workers=2)
    bad, good = np.array([[1, 50], [50, 1]])[place], np.array([2, 3])
    stream.prefetch([good, bad])
    stream.fetch(good)
    with pytest.raises(RefusedError, match=expected):
        stream.fetch(bad)
