"""Every rank makes whole runs whose head is solved: cached and streamed ones, a stopped and resumed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hvfreeze.comm.world import World
from hvfreeze.data import batches
from hvfreeze.heads import rows
from hvfreeze.strategies import fitted_head as strategy
from tests.parallel.workers.checking import let_models_be_small, small_shufflenet
from tests.parallel.workers.runs import Runs, stopped_solving

MODEL = "shufflenet_v2_x0_5"
SAMPLES, BATCH = 130, 16
SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "train_samples": SAMPLES * 5 // 4,
    "validation_fraction": 0.2,
    "batch_size": BATCH,
    "augment": "views:2",
    "head": "multi-level",
    "head_fit": "exact",
    "pool": 1,
}


def setting(world: World, root: Path) -> Runs:
    let_models_be_small()
    # So that features come in several batches, and two of them make a chunk, of which a rank has several.
    batches.PIXELS_AT_ONCE, rows.CHUNK_ROWS = 0, 2 * BATCH
    return Runs(world, root, SETTINGS)


def check_runs_that_solve_their_head_are_equal_cached_or_not_stopped_or_not(runs: Runs) -> None:
    world, root = runs.world, runs.root
    straight = runs("straight")
    kept = {"cache": "on", "cache_dir": str(root / "rows")}
    # While features are computed.
    stopped_solving(runs, "stopped", when=lambda count, note: count > 2 * BATCH, **kept)
    same = {"resumed": runs("stopped", resume=True, **kept)}
    same["complete"] = runs("stopped", resume=True, **kept)
    same["reads"] = runs("reads", **kept)
    with patch.object(strategy, "memory_budget", lambda local_size: 0):
        same["streamed"] = runs("streamed", cache="on" if world.size == 2 else "off")
    for name, summary in same.items():
        assert summary["parameter_digest"] == straight["parameter_digest"], f"{name}: another model"
        assert {**summary["head"], "exchanged_bytes": 0} == {**straight["head"], "exchanged_bytes": 0}, name
        assert summary["test_accuracy"] == straight["test_accuracy"], name
    assert same["resumed"]["cache"]["rows_read"] > 0, "what was cached before the stop is of no use"
    assert same["reads"]["cache"]["rows_written"] == 0
    assert same["reads"]["cache"]["rows_read"] == 2 * SAMPLES
    if world.size == 2:
        assert same["streamed"]["cache"]["rows_written"] == 2 * SAMPLES
        assert same["streamed"]["cache"]["rows_read"] > 10 * SAMPLES
    if world.rank == 0:
        for name in ("reads", "streamed", "stopped"):
            assert runs.numbers(name) == runs.numbers("straight"), name
    last = runs("last", head="last", augment="none", pool=None)
    assert straight["head"]["converged"] and straight["head"]["rows"] == 2 * SAMPLES
    assert last["head"]["rows"] == SAMPLES, "digits are not mirrored"
    assert straight["test_accuracy"] > 0.4, straight["test_accuracy"]
    assert straight["allreduce_bytes"] > 0
    assert straight["cut_history"] == [[0, 0, 1]] and straight["epochs"] == straight["steps"] == 0
    if world.rank == 0:
        model: Any = small_shufflenet(10)
        model.load_state_dict(torch.load(root / "last" / "model.pt", weights_only=True), strict=True)
        assert model.fc.weight.abs().sum() > 0
