from __future__ import annotations

import numpy as np
import pytest

from hvfreeze.inference.calibration import BINS, Calibration, plot_calibration


def test_the_error_is_the_mean_difference_over_samples_whichever_way_it_goes() -> None:
    sure, right = (
        np.array([0.95] * 6 + [0.35] * 2 + [1.0, 1 / BINS]),
        np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 0], dtype=bool),
    )
    found = Calibration.of(sure, right)
    assert found.samples.sum() == 10 and found.samples[-1] == 7 and found.samples[0] == 1, (
        "edges belong to the bin below"
    )
    top = abs((6 * 0.95 + 1) / 7 - 4 / 7)
    assert found.error == pytest.approx((7 * top + 2 * 0.65 + 1 / BINS) / 10)
    rows = found.rows()
    assert (rows[0]["above"], rows[-1]["to"]) == (0, 1) and rows[7] == {**rows[7], "samples": 0, "accuracy": None}


def test_the_figure_shows_accuracies_beside_the_diagonal_and_tells_the_error() -> None:
    found = Calibration.of(np.array([0.95, 0.95, 0.5]), np.array([True, False, True]))
    above, below = plot_calibration(found).axes
    heights = [bar.get_height() for bar in above.patches]
    assert len(heights) == BINS and heights[-1] == 50 and heights[7] == 100
    assert "calibration error 46.7 %" in above.get_title()
    assert sum(bar.get_height() for bar in below.patches) == pytest.approx(100)
