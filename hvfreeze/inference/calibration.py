"""The expected calibration error of a model and its reliability diagram.

Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017): samples are binned by the probability of their
predicted class; the error is the mean over samples of the difference of confidence and accuracy in their bin.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hvfreeze.report.figures import NARROW, STYLE

BINS = 15


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence and accuracy of predictions in `BINS` bins of equal width."""

    samples: NDArray[np.int64]
    """Number of samples per bin, (BINS,)."""
    confidence: NDArray[np.float64]
    """Mean probability of the predicted classes per bin, (BINS,), 0-1; NaN for empty bins."""
    accuracy: NDArray[np.float64]
    """Accuracy per bin, (BINS,), 0-1; NaN for empty bins."""

    @classmethod
    def of(cls, confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> Calibration:
        """Bin samples by `confidence`, (N,), the probability of the predicted class; `correct` is a mask, (N,)."""
        confidence = np.nan_to_num(confidence)
        place = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
        samples, sums, rights = (
            np.bincount(place, weights, BINS) for weights in (None, confidence, correct.astype(np.float64))
        )
        with np.errstate(invalid="ignore"):
            return cls(samples, sums / samples, rights / samples)

    @property
    def mean_confidence(self) -> float:
        """Mean confidence of all samples, 0-1."""
        return float(np.nansum(self.confidence * self.samples) / self.samples.sum())

    @property
    def error(self) -> float:
        """The expected calibration error, 0-1."""
        return float(np.nansum(np.abs(self.confidence - self.accuracy) * self.samples) / self.samples.sum())

    def rows(self) -> list[dict[str, float | int | None]]:
        """Return a table row for each bin."""
        edges = np.linspace(0, 1, BINS + 1)
        return [
            {
                "above": round(float(edges[place]), 6),
                "to": round(float(edges[place + 1]), 6),
                "samples": int(count),
                "confidence": float(self.confidence[place]) if count else None,
                "accuracy": float(self.accuracy[place]) if count else None,
            }
            for place, count in enumerate(self.samples.tolist())
        ]


def plot_calibration(found: Calibration) -> Figure:
    """Return the reliability diagram: accuracy by confidence, with the diagonal of perfect calibration.

    A second plot has the number of samples per bin.
    """
    centres = 100 * (np.arange(BINS) + 0.5) / BINS
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(NARROW, 1.25 * NARROW), layout="constrained")
        above, below = figure.subplots(2, height_ratios=(4, 1), sharex=True)
        above.bar(centres, np.nan_to_num(100 * found.accuracy), 92 / BINS)
        above.plot([0, 100], [0, 100], color="#888888", linewidth=1, linestyle="--")
        known = found.samples > 0
        above.plot(100 * found.confidence[known], 100 * found.accuracy[known], ".", color="#222222")
        above.set(ylabel="accuracy (%)", xlim=(0, 100), ylim=(0, 100))
        above.set_title(f"calibration error {100 * found.error:.1f} %")
        below.bar(centres, 100 * found.samples / found.samples.sum(), 92 / BINS)
        below.set(xlabel="confidence (%)", ylabel="samples (%)")
        return figure
