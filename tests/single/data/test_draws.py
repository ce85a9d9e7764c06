"""The counter-based random bits: fixed for ever, spread evenly, independent of the company a row is in."""

from __future__ import annotations

import numpy as np

from hvfreeze.data.shards import draw, shuffled, two_below

IDS = np.arange(10_000)


def test_draws_are_the_same_in_every_version() -> None:
    # The first output of splitmix64 for seed 0, as published.
    assert int(draw("", 0)[0]) == 0xE220A8397B1DCDAF
    assert draw("crop", 1, np.array([2, 3]), np.array([4, -5])).tolist() == [10786228180689515869, 12421850170462330413]


def test_a_row_is_the_same_in_any_batch() -> None:
    everything = draw("crop", 7, IDS, IDS % 3)
    some = IDS[::-7]
    np.testing.assert_array_equal(draw("crop", 7, some, some % 3), everything[some])


def test_every_word_and_its_place_matter() -> None:
    draws = [draw("crop", 1, 2), draw("flip", 1, 2), draw("crop", 2, 1), draw("crop", 1, 2, 0), draw("crop", -1, 2)]
    assert len({int(bits[0]) for bits in draws}) == len(draws)


def test_bits_and_pairs_of_integers_are_even_and_uncorrelated() -> None:
    bits = draw("crop", 0, IDS)
    ones = [(bits >> np.uint64(shift) & np.uint64(1)).mean() for shift in range(64)]
    assert np.abs(np.array(ones) - 0.5).max() < 0.025
    high, low = two_below(bits, 9)
    assert {*high} == {*low} == set(range(9))
    table = np.histogram2d(high, low, bins=9)[0]
    assert ((table - len(IDS) / 81) ** 2 / (len(IDS) / 81)).sum() < 150


def test_shuffled_is_a_permutation_from_which_a_missing_id_moves_no_other() -> None:
    order = shuffled(IDS, "order", 3)
    assert sorted(order) == list(IDS)
    assert (order == IDS).mean() < 0.01
    np.testing.assert_array_equal(shuffled(np.delete(IDS, 55), "order", 3), order[order != 55])
