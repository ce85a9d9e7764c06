"""What every strategy promises the loop, checked on the strategy that is named: `contract.py DIRECTORY STRATEGY`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config, from_dict
from hvfreeze.errors import HvfreezeError, NumericsError, UsageError
from hvfreeze.model.early_exits import CRITICS
from hvfreeze.model.model_sources import build_model
from hvfreeze.runs.checkpoint_file import packed, unpacked
from hvfreeze.strategies.base import State
from hvfreeze.training.build import prepare
from hvfreeze.training.evaluation import evaluate
from hvfreeze.training.job import Job
from hvfreeze.training.run import run
from tests.parallel.workers.checking import let_models_be_small

BATCH, STEPS, RATE = 6, 3, 0.05
STOP, END = 4, 7
"""Steps: the first is within a round and an epoch, and at a vote, where statistics are averaged."""
CACHED = {"augment": "none", "cache": "on"}
SETTINGS: dict[str, dict[str, Any]] = {
    "replicas": {"freeze": "linear", "interval": 2, "freeze_warmup": 2, **CACHED},
    "shared-trunk": {"heads": 3, "head_blocks": 2, "labels": "ride", **CACHED},
    "grid": {"freeze": "linear", "interval": 2, "freeze_warmup": 2, "redeal": "on", **CACHED},
    "local-sgd": {"local_steps": 3, "freeze": "static", "cut": 1, **CACHED},
    "stale-ring": {
        "augment": "none",
        "stale_after": 3,
        "tied_gradient": "half",
        "context": 8,
        "optimizer": "sgd",
        "clip_grad": 5.0,
    },
    "local-critics": {"critic_every": 2, "freeze": "static", "cut": 1, **CACHED},
    "subnets": {"local_steps": 3, "momentum": 0.9, **CACHED},
}
"""What a strategy is tried with; it should move, keep and exchange all that it can."""
MODELS = {"stale-ring": "tiny-lm", "subnets": "mlp-13x10"}
"""What is trained, where it is not a ResNet."""
UNVOTED: dict[str, Any] = {"interval": None, "freeze_warmup": None}
UNFIT: dict[str, list[dict[str, Any]]] = {
    "replicas": [{"freeze": "static", "cut": 99, **UNVOTED}, {"vote_weight": "1,1,1,1,1,1,1", "freeze": "linear"}],
    "shared-trunk": [
        {"head_blocks": 99},
        {"head_lr": "0.1,0.1"},
        {"mixup": 0.2},
        {"freeze": "linear"},
        {"accumulate": 2},
        {"heads": None, "tasks": "/nowhere/tasks.csv"},
        {"cut_by": "given", "cut_at": "3,2"},
    ],
    "grid": [
        {"parts": 99},
        {"replicas": 7},
        {"micro_batches": 7},
        {"micro_batches": 6, "model": "shufflenet_v2_x0_5"},
        {"mixup": 0.2},
        {"compression": "powersgd:2"},
        {"cut_by": "given", "cut_at": "3,2,1"},
        {"freeze": "static", "cut": 99, **UNVOTED},
        {"micro_batches": 4, "redeal": "off"},
        {"micro_batches": 5},
        {"vote_weight": "1,1,1,1,1"},
    ],
    "local-sgd": [
        {"freeze": "linear", "cut": None},
        {"shadow": "linear"},
        {"compression": "fp16"},
        {"freeze": "static", "cut": 99},
    ],
    "stale-ring": [
        {"parts": 99},
        {"freeze": "static", "cut": 1},
        {"shadow": "linear"},
        {"cache": "on"},
        {"compression": "fp16"},
        {"accumulate": 2},
        {"optimizer": "lars"},
        {"cut_by": "given", "cut_at": "3,2"},
        {"cut_by": "given", "cut_at": "8"},
    ],
    "local-critics": [
        {"parts": 99},
        {"freeze": "linear", "cut": None},
        {"shadow": "linear"},
        {"mixup": 0.2},
        {"compression": "fp16"},
        {"accumulate": 2},
        {"cut": 99},
        {"cut_by": "given", "cut_at": "1,2,3"},
        {"cut_by": "given", "cut_at": "2,3"},
        {"cut_by": "given", "cut_at": "4,3,2"},
    ],
    "subnets": [
        {"model": "shufflenet_v2_x0_5"},
        {"freeze": "linear"},
        {"freeze": "static", "cut": 1},
        {"shadow": "linear"},
        {"compression": "fp16"},
        {"optimizer": "adamw"},
    ],
}
"""What a strategy must refuse, on all ranks."""
FITS_ONE: dict[str, dict[str, Any]] = {
    "stale-ring": {"parts": 2},
    "local-critics": {"parts": 1},
    "subnets": {"model": "mlp-64x1"},
}
"""What a strategy must refuse on several ranks, and one rank takes."""
POOLED_ANEW = ("local-sgd",)
"""Whose states hold each rank's own running statistics: their sums are rounded in another order than in training."""
ALONE = ("local-sgd", "subnets")
"""Whose ranks train alone in rounds: one with numbers that are not finite ends the job."""
REPORTED = {"cut_history", "allreduce_bytes", "other_collective_bytes", "cache"}


class Trial:
    """Jobs of one strategy, each in a directory of its own."""

    def __init__(self, world: World, root: Path, name: str) -> None:
        self.world, self.root, self.name, self.count = world, root, name, 0
        self.model = MODELS.get(name, "resnet20")
        let_models_be_small()

    def config(self, **changes: Any) -> Config:
        self.count += 1
        base = {
            "model": self.model,
            "train_samples": STEPS * BATCH * self.world.size * 5 // 4 + 10,
            "validation_fraction": 0.2,
            "batch_size": BATCH,
            "epochs": 3,
            "threads": 1,
            "strategy": self.name,
            "run_dir": str(self.root / f"{self.name}-{self.count}"),
        }
        if self.name == "stale-ring":
            # Shorter than the default text.
            path = self.root / f"text-{self.world.rank}.txt"
            path.write_text("".join(f"line {number} of a text\n" for number in range(400)))
            base["data_dir"] = str(path)
        if self.name == "grid":
            # Samples of a batch that every number of partitions divides.
            base |= {"parts": 2 if self.world.size == 4 else None, "micro_batches": 3 if self.world.size == 3 else 2}
        return from_dict({**base, **SETTINGS[self.name], **changes})

    def job(self, **changes: Any) -> Job:
        return prepare(self.config(**changes), self.world)

    def train(self, job: Job, *, first: int, last: int, disturbed: bool = False) -> str:
        """Make the steps first..last-1; return the digest of the whole model then."""
        strategy = job.strategy
        for epoch in range(3):
            batches = [(epoch * STEPS + i, batch) for i, batch in enumerate(job.feed.epoch(epoch)[:STEPS])]
            due = [batch for step, batch in batches if first <= step < last]
            if due:
                strategy.begin_epoch(due)
            for batch in due:
                strategy.step([batch], rate=RATE, leave=False)
                if disturbed:
                    strategy.predict(job.evaluation_batches[0])
        strategy.settle()
        digest = strategy.check(step=last)
        assert len(set(self.world.allgather_object(digest, name="contract.digest"))) == 1
        return digest

    def whole_models(self, job: Job) -> dict[str, Tensor]:
        """Return copies of the tensors of all models on rank 0, by the names of both."""
        found = [(name, state) for name, state, *_ in job.strategy.whole_models()]
        return {f"{name}.{key}": tensor.clone() for name, state in found for key, tensor in state.items()}


def check_a_trained_strategy_is_saved_loaded_moved_evaluated_reported_and_closed(trial: Trial) -> None:
    straight, stopped, resumed, moved = (trial.job() for _ in range(4))
    expected = trial.train(straight, first=0, last=END)
    before = trial.train(stopped, first=0, last=STOP, disturbed=True)
    random, state = torch.get_rng_state(), stopped.strategy.state_dict()
    shared = trial.world.broadcast_object(state.shared, name="contract.shared")
    owns = trial.world.allgather_object(packed(state.own), name="contract.own")
    own = unpacked(owns[trial.world.rank], name="contract")
    resumed.strategy.load_state_dict(State(copy.deepcopy(shared), own))
    torch.set_rng_state(random)
    assert resumed.strategy.cut == stopped.strategy.cut
    found = trial.train(resumed, first=STOP, last=END)
    assert found == expected, "a strategy that predicted or was put back trains on otherwise"
    see_that_another_number_of_ranks_goes_on(trial, stopped, moved, before, (shared, owns))
    see_predictions(trial, straight)
    see_the_end(trial, straight, expected)


def see_that_another_number_of_ranks_goes_on(
    trial: Trial, stopped: Job, moved: Job, before: str, saved: tuple[dict[str, Any], list[bytes]]
) -> None:
    """Compare a strategy that loads states made for another number of ranks with the one that was stopped."""
    shared, owns = saved
    # Of equal steps, and of the same number of ranks: all that is left of before are models, cut and statistics.
    states = moved.strategy.repartitioned(
        (unpacked(own, name="contract") for own in owns), size=trial.world.size, restep=lambda step: step
    )
    mine = list(states)[trial.world.rank]
    moved.strategy.load_state_dict(State(shared, unpacked(packed(mine), name="contract")))
    moved.strategy.settle()
    digest = moved.strategy.check(step=STOP)
    if trial.name in POOLED_ANEW:
        models = trial.whole_models(stopped)
        for name, tensor in trial.whole_models(moved).items():
            one_rounding = 2.0**-23 if name.endswith(("running_mean", "running_var")) else 0.0
            torch.testing.assert_close(tensor, models[name], rtol=one_rounding, atol=0.0)
    else:
        assert digest == before, "models are not what they were"
    assert moved.strategy.cut == stopped.strategy.cut
    theirs, now = (job.strategy.report() for job in (stopped, moved))
    for key in ("cut_history", "allreduce_bytes"):
        assert now[key] == theirs[key], key
    trial.train(moved, first=STOP, last=STOP + 1)


def see_predictions(trial: Trial, job: Job) -> None:
    """Compare predictions in both orders; scores are equal on all ranks."""
    batches = job.evaluation_batches
    forward = [job.strategy.predict(batch) for batch in batches]
    backward = [job.strategy.predict(batch) for batch in reversed(batches)][::-1]
    for there, back in zip(forward, backward, strict=True):
        assert set(there) == set(back) <= set(job.strategy.models)
        for name, (logits, labels) in there.items():
            assert torch.equal(logits, back[name].logits) and torch.equal(labels, back[name].labels)
            assert logits.dtype == torch.float32 and not logits.requires_grad
    scores = evaluate(job.strategy, batches, trial.world, job.task)
    assert list(scores) == list(job.strategy.models)
    assert len(set(trial.world.allgather_object(str(scores), name="contract.scores"))) == 1


def see_the_end(trial: Trial, job: Job, digest: str) -> None:
    """Settling and closing twice changes nothing; reports are equal on all ranks; models fit the one that was given."""
    job.strategy.settle()
    assert job.strategy.check(step=END) == digest
    found = job.strategy.report()
    assert set(found) >= REPORTED, REPORTED - set(found)
    fixed = {key: value for key, value in found.items() if key != "cache"}
    assert len({str(theirs) for theirs in trial.world.allgather_object(fixed, name="contract.report")}) == 1
    assert found["cut_history"][-1].cut == job.strategy.cut
    card = job.card
    classes, side = len(card.classes), max(card.preparation.shape)
    given = build_model(trial.model, num_classes=classes, image_size=side).model.state_dict()
    models = list(job.strategy.whole_models())
    assert [name for name, *_ in models] == list(job.strategy.models)
    for _, state, *_ in models if trial.world.rank == 0 else []:
        # Critics lie beside the model that was given.
        shapes = {name: tensor.shape for name, tensor in state.items() if not name.startswith(f"{CRITICS}.")}
        assert shapes == {name: tensor.shape for name, tensor in given.items()}
        assert all(tensor.isfinite().all() for tensor in state.values())
    job.strategy.close()
    job.strategy.close()


def check_numbers_that_are_not_finite_stop_all_ranks(trial: Trial) -> None:
    lr, what = {"lr": 1e30}, "NaN or Inf"
    if trial.name == "shared-trunk":
        # One of its models.
        lr, what = {"head_lr": "0.01,0.01,1e38"}, "NaN or Inf in the loss or gradients of model-head2;"
    config = trial.config(**lr, weight_decay=0.0, epochs=1)
    try:
        run(config, trial.world)
    except NumericsError as error:
        assert what in str(error) and error.everywhere is (trial.name not in ALONE), error
        assert not list(Path(config.run.run_dir).glob("checkpoints/step-*.pt")), "numbers that are not finite are kept"
    else:
        raise AssertionError("nobody noticed")


def check_what_does_not_fit_is_refused_by_all(trial: Trial) -> None:
    unfit, fits_one = list(UNFIT[trial.name]), FITS_ONE.get(trial.name)
    if fits_one is not None and trial.world.size == 1:
        trial.job(**fits_one)
    elif fits_one is not None:
        unfit.append(fits_one)
    for changes in unfit:
        try:
            config = trial.config(**changes)
        except UsageError:
            # Every rank knows that from the settings.
            continue
        try:
            prepare(config, trial.world)
        except HvfreezeError as error:
            assert error.everywhere and error.exit_code in (2, 3), repr(error)
        else:
            raise AssertionError(f"{trial.name} accepts {changes}")


setting = Trial
