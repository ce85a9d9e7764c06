"""Table cells that several experiments show: a label beside full fine-tuning, and the choice of the learning rate."""

from __future__ import annotations

from analysis.sweeps.results import Results
from analysis.sweeps.statistics import shown, signed_points, time_saved
from hvfreeze.report.tables import Table
from hvfreeze.report.units import factor, percent, seconds

COMPARED = ("Training time", "Speed-up", "Time saved", "Test accuracy", "Against full")
SAME_TIME, FINAL_CUT = "Full, trained as long", "Final cut"


def compared(results: Results, label: str, reference: str) -> tuple[str, ...]:
    """Return the cells below `COMPARED`, against the label of full fine-tuning."""
    gain = results.gain(label, reference)
    return (
        shown(results.mean(label, "train_seconds"), seconds),
        shown(gain, factor),
        shown(time_saved(gain), percent),
        shown(results.mean(label, "test_accuracy"), percent),
        shown(results.change(label, reference), signed_points),
    )


def same_time(results: Results, label: str) -> str:
    """Return the cell below `SAME_TIME`: accuracy against full fine-tuning trained for as many seconds."""
    return shown(results.over_front(label), signed_points)


def final_cut(results: Results, label: str) -> str:
    """Return the cell below `FINAL_CUT`."""
    return shown(results.cut(label), lambda cut: f"{cut:.1f}")


def learning_rates(results: Results) -> Table:
    """Return the learning rates that were tried, with their accuracies on held-out training samples."""
    rates = [label for label in results.labels if label.startswith("lr")]
    tried = tuple((label[2:], shown(results.mean(label, "test_accuracy"), percent)) for label in rates)
    return Table(title="Learning rates", columns=("Learning rate", "Accuracy on held-out samples"), rows=tried)
