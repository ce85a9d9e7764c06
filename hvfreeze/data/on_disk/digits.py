"""Scikit-learn's digits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt


def digits_table() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return images (1797, 8, 8) with values 0..16, and digits (1797,), of scikit-learn's `load_digits`.

    They are read from its file where that is found: to import scikit-learn takes longer than an epoch of them.
    """
    package = find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets/data/digits.csv.gz" if package else Path()
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(np.int64)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target
