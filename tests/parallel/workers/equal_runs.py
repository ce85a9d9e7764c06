"""Every rank makes runs that differ in what changes no bit: a cache, or how often the model is evaluated."""

from __future__ import annotations

from pathlib import Path

from hvfreeze.comm.world import World
from tests.parallel.workers.checking import let_models_be_small
from tests.parallel.workers.runs import Runs, lines

SAMPLES = 48
TRAINED = {"model": "shufflenet_v2_x0_5", "image_size": 32, "train_samples": SAMPLES, "batch_size": 4, "epochs": 2}
FROZEN = {"lr": 0.01, "freeze": "static", "cut": 2, "augment": "none"}


def check_ranks_without_evaluation_samples_cache_like_the_others(runs: Runs) -> None:
    on, off = (runs(f"few-{mode}", **FROZEN, validation_fraction=0.042, cache=mode) for mode in ("on", "off"))
    held_out = f"{runs.world.size - 1} training samples are held out"
    assert held_out in (runs.root / "few-on" / "log.txt").read_text(), "each rank has one: this check says nothing"
    assert on["parameter_digest"] == off["parameter_digest"]
    assert on["test_accuracy"] == off["test_accuracy"]
    assert on["cache"]["rows_read"] > 0


def check_ranks_that_meet_all_samples_share_what_each_has_computed(runs: Runs) -> None:
    flags = {**FROZEN, "shuffle": "global"}
    shared = {"cache": "on", "cache_shared": True, "cache_dir": str(runs.root / "cache")}
    uncached = runs("uncached", **flags)
    for name, written in (("first", SAMPLES), ("later", 0)):
        found = runs(name, **flags, **shared)
        assert found["parameter_digest"] == uncached["parameter_digest"], name
        assert found["cache"]["exact"] is True
        assert found["cache"]["rows_written"] == written, found["cache"]
        assert found["cache"]["rows_read"] == 2 * SAMPLES


def check_evaluating_less_often_changes_no_bit_of_the_training(runs: Runs) -> None:
    votes = {"lr": 0.05, "freeze": "linear", "interval": 2, "freeze_warmup": 2, "epochs": 3}
    found = [runs(f"every-{epochs}", **votes, evaluate_every=epochs) for epochs in (1, 2)]
    often, seldom = (lines(runs.root / f"every-{epochs}", "metrics") for epochs in (1, 2))
    assert [line["test_accuracy"] is None for line in seldom] == [True, False, False]
    assert seldom[1:] == often[1:]
    assert {**often[0], "test_loss": None, "test_accuracy": None} == seldom[0]
    for key in ("parameter_digest", "test_accuracy", "cut_history"):
        assert found[0][key] == found[1][key], key


def setting(world: World, root: Path) -> Runs:
    let_models_be_small()
    return Runs(world, root, TRAINED)
