from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from hvfreeze.config.data import DataConfig
from hvfreeze.data.batches import deal, open_feeds
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.text import UNKNOWN, characters_of, encode, per_character
from hvfreeze.errors import RefusedError

TEXT = "".join(f"line {number} of a text\n" for number in range(200))
CONTEXT = 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def decoded(codes: torch.Tensor, characters: tuple[str, ...]) -> str:
    return "".join(characters[code] for code in codes.tolist())


def test_codes_stand_for_characters_and_rare_ones_for_the_unknown() -> None:
    characters = characters_of("aab" * 8 + "\u00e9" + UNKNOWN)
    assert characters == ("a", "b", UNKNOWN)
    assert encode("ba\u00e9z" + UNKNOWN, characters).tolist() == [1, 0, 2, 2, 2]


def test_a_text_is_encoded_in_pieces_that_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvfreeze.data.text.PIECE", 1000)
    text = "ab\u00e9c" * 25_000
    characters = characters_of(text[:100])
    tracemalloc.start()
    try:
        codes = encode(text, characters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "".join(characters[code] for code in codes[998:1003]) == text[998:1003] and len(codes) == len(text)
    assert codes.tolist() == codes[:4].tolist() * 25_000
    assert peak < 2 * len(text), "22 bytes per character of a piece, 1 byte of the whole text"


def test_a_model_knows_no_more_characters_than_a_byte_counts() -> None:
    text = "".join(chr(code) * (9 + code % 2) for code in range(100, 600))
    characters = characters_of(text)
    assert len(characters) == 256 and list(characters[:-1]) == sorted(characters[:-1])
    assert encode(text, characters).max() == 255


def test_windows_tile_the_text_and_labels_are_what_follows(file: Path) -> None:
    data = DataConfig(data="text", data_dir=str(file), augment="none", context=CONTEXT)
    corpus = deal(open_data("text", str(file), context=CONTEXT), data, seed=1, batch_size=4, replicas=2)
    feeds = [open_feeds(corpus, data, seed=1, replica=r, budget_bytes=0) for r in range(2)]
    border = len(TEXT) - len(TEXT) // 10
    seen: dict[int, str] = {}
    for feed, _ in feeds:
        for batch in feed.epoch(0):
            codes = feed.images.load(batch.ids, batch.views)
            assert codes.shape == batch.labels.shape == (4, CONTEXT)
            assert torch.equal(codes[:, 1:], batch.labels[:, :-1])
            for number, row, labels in zip(batch.ids.tolist(), codes, batch.labels, strict=True):
                seen[number] = decoded(row, corpus.train.classes)
                assert decoded(labels, corpus.train.classes) == TEXT[number * CONTEXT + 1 :][:CONTEXT]
    assert len(seen) >= (border - 1) // CONTEXT - 8, "ranks share the windows, but for what fills no batch"
    assert all(text == TEXT[number * CONTEXT :][:CONTEXT] for number, text in seen.items())
    evaluated = feeds[0][1]
    tested = evaluated.load(np.arange(2), np.zeros(2, dtype=np.int64))
    assert decoded(tested.flatten(), corpus.train.classes) == TEXT[border:][: 2 * CONTEXT]


def test_views_begin_elsewhere_in_every_epoch_and_end_before_the_text(file: Path) -> None:
    data = DataConfig(data="text", data_dir=str(file), context=CONTEXT)
    corpus = deal(open_data("text", str(file), context=CONTEXT), data, seed=1, batch_size=4, replicas=1)
    feed, _ = open_feeds(corpus, data, seed=1, replica=0, budget_bytes=0)
    ids = np.arange(len(corpus.train))
    starts = []
    for epoch in range(3):
        views = np.full_like(ids, epoch)
        codes, labels = feed.images.load(ids, views), feed.images.labels_of(ids, views)
        assert torch.equal(codes, feed.images.load(ids, views)), "a view is always the same"
        assert torch.equal(codes[:, 1:], labels[:, :-1])
        starts.append(codes)
        for number, row in zip(ids.tolist(), codes, strict=True):
            reached = TEXT[number * CONTEXT : (number + 2) * CONTEXT]
            assert decoded(row, corpus.train.classes) in reached or number == len(ids) - 1
    assert not torch.equal(starts[0], starts[1]) and not torch.equal(starts[1], starts[2])


def test_the_default_text_is_pythons_standard_library() -> None:
    splits = open_data("text")
    assert "standard library" in splits.notes[0]
    assert len(splits.train) > 10_000 and splits.train.classes == splits.test.classes
    assert {"\n", " ", "d", "e", "f", "("} <= set(splits.train.classes)


def test_other_windows_of_a_text_are_other_data(file: Path) -> None:
    whole, other = (open_data("text", str(file), context=context).train.identity() for context in (8, 9))
    assert whole != other
    file.write_text(TEXT.replace("line 7 of", "line 8 of"))
    assert open_data("text", str(file), context=8).train.identity() != whole


def test_what_cannot_be_a_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a line\n" * 20)
    with pytest.raises(RefusedError, match=r"short.txt has 140 characters.*--context \(64\)"):
        open_data("text", str(tmp_path / "short.txt"))
    with pytest.raises(RefusedError, match=r"--data-dir \(.*nowhere.txt\) cannot be read"):
        open_data("text", str(tmp_path / "nowhere.txt"))
    with pytest.raises(RefusedError, match="cannot be read"):
        open_data("text", str(tmp_path))


def test_a_loss_is_told_in_bits_and_as_perplexity() -> None:
    assert per_character(np.log(8)) == {"bits_per_character": pytest.approx(3), "perplexity": pytest.approx(8)}
