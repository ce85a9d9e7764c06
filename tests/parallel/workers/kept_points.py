"""Every rank makes whole runs whose points are kept: the next one, and one that was stopped, begin with the solver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvfreeze.comm.world import World
from hvfreeze.data import batches
from hvfreeze.data.batches import Batch
from hvfreeze.errors import RefusedError
from hvfreeze.heads import centres, kernel
from hvfreeze.heads.kept_points import KeptPoints
from hvfreeze.heads.points import OwnPoints
from hvfreeze.prefix.features import Features
from tests.parallel.workers.checking import let_models_be_small, with_folder
from tests.parallel.workers.runs import Runs, stopped_solving

BATCH = 16
# So that features come in several batches.
batches.PIXELS_AT_ONCE = 0
SETTINGS: dict[str, Any] = {
    "model": "shufflenet_v2_x0_5",
    "train_samples": 160,
    "validation_fraction": 0.2,
    "batch_size": BATCH,
    "augment": "none",
    "head": "multi-level",
    "head_fit": "kernel",
    "pool": 2,
}


class Fetched:
    """Counts the training batches whose features this rank asks for."""

    def __init__(self) -> None:
        self.batches, of = 0, Features.of

        def counting(features: Features, batch: Batch) -> Any:
            self.batches += features.source.split.name == "train"
            return of(features, batch)

        Features.of = counting  # type: ignore[method-assign,assignment]

    def of(self, work: Any) -> int:
        """Return how many `work` asks for."""
        before = self.batches
        work()
        return self.batches - before


def stopped_in_the_solver(runs: Runs, name: str, *, at: str = "", **changes: Any) -> None:
    """Make a run that the last rank is asked to leave when all features are points, and a note has `at` in it."""
    stopped_solving(runs, name, when=lambda count, note: count == 0 and at in note, **changes)


@with_folder
def check_points_that_are_kept_make_the_same_head_and_no_others_are_used(world: World, root: Path) -> None:
    let_models_be_small()
    fetched = Fetched()
    # Where each row is left out in turn, the choice has no passes to be stopped in.
    kernel.MOST_LEFT_OUT, kernel.MOST_FACTORED_ROWS = 20, 0
    runs = Runs(world, root, SETTINGS)
    found: dict[str, Any] = {"straight": runs("straight")}
    kept = {"cache": "auto", "cache_dir": str(root / "rows")}

    def make(name: str, **changes: Any) -> int:
        return fetched.of(lambda: found.update({name: runs(name, **{**kept, **changes})}))

    write = KeptPoints._write

    def in_turn(self: KeptPoints, mine: OwnPoints) -> None:
        for rank in range(world.size):
            if rank == world.rank:
                write(self, mine)
            world.barrier(name=f"turn.{rank}")

    # One rank's file is there before the next one looks whether its own is.
    KeptPoints._write = in_turn  # type: ignore[method-assign]
    whole = make("writes")
    assert whole > 1, whole
    assert make("reads") == 1, "one batch is compared"
    elsewhere = {**kept, "cache_dir": str(root / "stopped-rows")}
    stopped_in_the_solver(runs, "stopped", **elsewhere)
    assert make("stopped", resume=True, **elsewhere) == 1
    files = sorted((root / "rows" / "points").glob("*.h5"))
    assert len(files) == world.size, files
    assert make("other samples", data_seed=1) == whole and make("other features", pool=1) == whole
    world.barrier(name="damage")
    if world.rank == world.size - 1:
        mine = next(file for file in files if file.stem.endswith(f"-{world.rank}of{world.size}"))
        content = bytearray(mine.read_bytes())
        content[len(content) // 2] ^= 1
        mine.write_bytes(content)
    world.barrier(name="damaged")
    assert make("damaged") >= whole, "one rank's damage is everybody's"
    try:
        make("refused", cache_failure="stop")
    except RefusedError as error:
        assert "points" in str(error) and error.everywhere, error
    else:
        raise AssertionError("a damaged file was used")
    for name in ("writes", "reads", "stopped", "damaged"):
        summary, straight = found[name], found["straight"]
        assert summary["parameter_digest"] == straight["parameter_digest"], f"{name}: another model"
        for told in (summary["head"], straight["head"]):
            told["passes"] = told["exchanged_bytes"] = 0
        assert summary["head"] == straight["head"] and summary["test_accuracy"] == straight["test_accuracy"], name


@with_folder
def check_a_solver_that_is_stopped_goes_on_where_it_was(world: World, folder: Path) -> None:
    let_models_be_small()
    root = folder / "centres"
    # A poor sample and a small tolerance, for many steps; the penalty is chosen without passes.
    kernel.MOST_LEFT_OUT, kernel.SAMPLED, centres.ANSWERS_TOLERANCE = 1_000, 1, 1e-6
    runs = Runs(world, root, {**SETTINGS, "centres": 40})
    kept = {"cache": "auto", "cache_dir": str(root / "rows")}
    straight, folder = runs("straight"), root / "rows" / "points"
    steps = straight["head"]["steps"]
    assert steps > 3, straight["head"]
    for resume in (False, True):
        # Its first product is made, and its second one not.
        stopped_in_the_solver(runs, "stopped", at="pass 2, 0 %", resume=resume, **kept)
        world.barrier(name=f"stopped.{resume}")
        assert len(list(folder.glob("solver-*"))) == 1, (
            resume,
            [(str(f), f.stat().st_size) for f in folder.glob("solver-*")],
        )
    resumed = runs("stopped", resume=True, **kept)
    assert resumed["parameter_digest"] == straight["parameter_digest"], "another head"
    assert resumed["head"]["steps"] == steps
    # A pass for each step, and of the run that was never stopped those that make points.
    assert resumed["head"]["passes"] == steps - 2 < straight["head"]["passes"] - 2
    assert not list(folder.glob("solver-*"))
    # A file that is damaged is none.
    stopped_in_the_solver(runs, "damaged", at="pass 2, 0 %", **kept)
    world.barrier(name="stopped")
    if world.rank == 0:
        (mine,) = folder.glob("solver-*")
        mine.write_bytes(mine.read_bytes()[:-100])
    world.barrier(name="cut")
    assert runs("damaged", resume=True, **kept)["parameter_digest"] == straight["parameter_digest"]
