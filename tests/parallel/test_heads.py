"""A head solved by all ranks is the one that scikit-learn finds on all rows at once, whoever holds which row."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest

from hvfreeze.comm.world import SoloWorld
from hvfreeze.heads import kernel
from hvfreeze.heads.kernel import fit_kernel
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.tasks import Classes
from tests.parallel import standing
from tests.parallel.workers.heads import CENTRES, ROWS
from tests.single.heads.table import CLASSES, CONSTANT, PENALTY, labelled_table

pytestmark = [pytest.mark.mpi, pytest.mark.standing]


@pytest.mark.parametrize("size", [3])
def test_solved_head_is_scikit_learns_on_all_rows_for_shares_of_any_size(size: int) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    first, *others = standing.call(size, "heads", "fit")

    features, labels, _ = (column.numpy() for column in labelled_table(ROWS))
    standardised = StandardScaler().fit_transform(features.astype(np.float64))
    reference = LogisticRegression(C=1 / (2 * PENALTY * len(labels)), tol=1e-8, max_iter=5000)
    reference.fit(standardised, labels)
    expected = np.column_stack([reference.coef_, reference.intercept_ - reference.intercept_.mean()])
    expected[:, CONSTANT] = 0
    right = (reference.predict(standardised) == labels).mean()

    assert all(other == first for other in others), "ranks report different heads"
    found = first["found"]
    for name, fit in found.items():
        assert fit["converged"], name
        np.testing.assert_allclose(fit["coefficients"], expected, atol=1e-4, err_msg=name)
        # Folded: for raw features, one of which has a mean a thousand times its deviation.
        logits = features.astype(np.float64) @ np.array(fit["weight"]).T + np.array(fit["bias"])
        assert logits.shape[1] == CLASSES
        assert (logits.argmax(1) == labels).mean() == right, name
    assert len({fit["penalty"] for fit in found.values()}) == 1, "the choice of the penalty depends on the shares"
    reference = np.array(found["even"]["compared"]["said"])
    for name, fit in found.items():
        said = fit["compared"]
        assert said["rows"] == len(labels) and said["held_out_accuracy"] > 0.65, name
        # Shares change the order of sums alone.
        assert np.linalg.norm(np.array(said["said"]) - reference) < 1e-3 * np.linalg.norm(reference), name
        assert (np.array(said["said"]).argmax(1) == labels).mean() > 0.9, name
    # As on the ranks: a part of the rows chooses the scale.
    with patch.object(kernel, "FEW", len(labels) // 2):
        alone = fit_kernel(
            RowsInMemory(*labelled_table(ROWS)),
            task=Classes(CLASSES),
            world=SoloWorld(),
            memory_bytes=2**30,
            penalties=[0.1],
            centres=CENTRES,
        )
    assert alone is not None
    for name, fit in found.items():
        some = np.array(fit["compared"]["some_said"])
        difference = np.linalg.norm(some - alone.answers.numpy()) / np.linalg.norm(some)
        assert difference < 0.01, f"{name}: other centres or another head than on one rank"
    assert len({fit["compared"]["penalty"] for fit in found.values()}) == 1, "the choice depends on the shares"
    losses = [loss for _, loss, _ in found["even"]["tried"]]
    falls = [after / before for before, after in itertools.pairwise(losses)]
    assert all(fall < 0.999 for fall in falls[:-1]), "the path went on where the held-out loss fell no more"
    assert falls[-1] > 0.999, "the path ended while the held-out loss still fell"
    assert found["even"]["penalty"] == found["even"]["tried"][-2][0]

    refused = first["refused"]
    assert [text.split(";")[0].split(", in ")[0] for text in refused] == [
        "head fit: 1 of 12 features, or their squares, are NaN or Inf, starting with feature 3",
        "head fit: 17 penalties and no held-out samples to choose one",
        "head fit: there are no samples to fit",
    ]

    assert first["decided"] == {
        f"{name}, {count}": [478, [100]] for count in ("few", "many") for name in ("kernel", "linear")
    }, "both views of the damaged sample are left out"
