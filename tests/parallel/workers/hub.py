"""Every rank trains models of transformers from a folder: frozen by votes, cached, stopped and resumed, and fitted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.training.run import run
from tests.hub_models import save_small
from tests.parallel.workers.checking import with_folder
from tests.parallel.workers.runs import SCHEDULED, Runs, configuration, interrupted

KIND = "vit"
IS_INSTALLED = importlib.util.find_spec("transformers") is not None


def small(world: World, folder: Path, kind: str) -> str:
    """Return the --model of a folder that rank 0 writes. Collective."""
    if world.rank == 0:
        save_small(kind, folder / kind)
    world.barrier(name="hub.saved")
    return f"hf:{folder / kind}"


@with_folder
def check_a_run_is_cached_and_resumed_bit_for_bit(world: World, folder: Path) -> None:
    if not IS_INSTALLED:
        return
    model = small(world, folder, KIND)

    def settings(name: str, **changes: Any) -> Config:
        common = {**SCHEDULED, "interval": 3, "augment": "none", "epochs": 3, "checkpoint_every": "3steps"}
        return configuration(folder / name, world.size, model=model, image_size=32, **{**common, **changes})

    plain = run(settings("plain"), world)
    interrupted(settings("stopped", cache="on"), world, after=5)
    resumed = run(settings("stopped", cache="on", resume=True), world)
    assert len({cut for _, _, cut in plain["cut_history"]}) > 1, "the cut did not move"
    assert resumed["parameter_digest"] == plain["parameter_digest"], "other bits"
    assert resumed["cache"]["exact"] is True and resumed["cache"]["rows_read"] > 0, resumed


@with_folder
def check_auto_fits_its_head(world: World, folder: Path) -> None:
    if not IS_INSTALLED:
        return
    shared = {"freeze": "auto", "model": small(world, folder, KIND), "image_size": 32, "epochs": 1}
    runs = Runs(world, folder, {**shared, "train_samples": 60, "augment": "none", "cache": "on"})
    summary = runs("auto")
    assert summary["head"]["rows"] > 0 and (folder / "auto" / "model.pt").exists(), summary
