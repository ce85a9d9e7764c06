"""Every rank trains its neurons of an MLP alone; the whole must be the twin's, and every byte and entry is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvfreeze.config.tree import Config
from hvfreeze.model.mlp import Mlp
from hvfreeze.model.model_sources import build_model
from hvfreeze.training.build import prepare
from hvfreeze.training.run import run
from tests.parallel.twins.subnets import Workers
from tests.parallel.workers import local_sgd
from tests.parallel.workers.checking import differing, let_models_be_small
from tests.parallel.workers.local_sgd import EPOCHS, LR, STEPS, killed
from tests.parallel.workers.runs import record_of, see_that_stopped_runs_go_on

DECAY = 1e-2


class Trial(local_sgd.Trial):
    """Runs with equal settings except the given ones, each in its own directory."""

    def __init__(self, world: Any, root: Path) -> None:
        self.world, self.root = world, root
        let_models_be_small()

    def config(self, name: str, **changes: Any) -> Config:
        return super().config(name, **{"strategy": "subnets", "model": "mlp-13x10", **changes})

    def twin(self, model: str, *, local_steps: int, momentum: float) -> Workers:
        torch.manual_seed(0)
        built: Any = build_model(model, num_classes=10, image_size=32).model
        options = {"lr": LR, "weight_decay": DECAY, "momentum": momentum}
        return Workers(built, number=self.world.size, local_steps=local_steps, seed=0, **options)


def bytes_of_a_round(twin: Workers) -> int:
    """What the owners send to others of the twin's pieces: 4 bytes an entry of neurons that are another worker's."""
    owners = [torch.arange(width).tensor_split(twin.number) for width in twin.model.widths]
    sent = 0
    for worker in range(twin.number):
        shares = [
            [sum(1 for neuron in hands[worker] if neuron in own.tolist()) for own in owners[layer]]
            for layer, hands in enumerate(twin.hands)
        ]
        before = [twin.model.inputs, *[len(hands[worker]) for hands in twin.hands[:-1]]]
        for owner in range(twin.number):
            if owner != worker:
                # Rows of the layer's own matrix, a scale and a shift; and the head's columns.
                sent += sum(share[owner] * (inputs + 2) for share, inputs in zip(shares, before))
                sent += shares[-1][owner] * twin.model.classes
    return 4 * sent


def check_every_round_is_the_twin(trial: Trial) -> None:
    size = trial.world.size
    for model, local_steps, momentum in (("mlp-13x10", 5, 0.9), ("mlp-9", 1, 0.0)):
        name = f"{model}-{local_steps}"
        summary = run(trial.config(name, model=model, local_steps=local_steps, momentum=momentum), trial.world)
        found, rounds = summary["subnets"], STEPS * EPOCHS // local_steps
        twin = trial.twin(model, local_steps=local_steps, momentum=momentum)
        for step in trial.steps():
            twin.step([(images.flatten(1), labels) for images, labels in step])
        each = bytes_of_a_round(twin)
        begun = -(-STEPS * EPOCHS // local_steps)
        assert found["rounds"] == rounds
        assert found["wire_bytes"] == {"dealt": each * begun, "returned": each * rounds}, (found, each)
        looked = EPOCHS * 4 * (size - 1) * sum(p.numel() for p in twin.model.parameters())
        unfinished = sum(1 for epoch in range(1, EPOCHS + 1) if epoch * STEPS % local_steps)
        assert found["evaluation_wire_bytes"] == looked + unfinished * each
        if trial.world.rank == 0:
            assert differing(trial.model(name), twin.seen().state_dict()) == [], f"{name}: not the twin"
        trial.world.barrier(name="test.twin")


def check_one_process_trains_as_plainly(trial: Trial) -> None:
    alone = trial.world.among([0])
    if alone is not None:
        given = {"momentum": 0.0, "head_lr": "0.01"}
        run(trial.config("plain", strategy="replicas", **given), alone)
        run(trial.config("alone", local_steps=10, **given), alone)
        plain, found = trial.model("plain"), trial.model("alone")
        parameters = [name for name in plain if "running" not in name and "num_batches" not in name]
        assert [name for name in parameters if not torch.equal(plain[name], found[name])] == []
    trial.world.barrier(name="test.alone")


def check_other_ranks_take_over_the_model_with_its_pieces(trial: Trial) -> None:
    job = prepare(trial.config("handed-over", local_steps=3), trial.world)
    strategy: Any = job.strategy
    for batch in (job.feed.epoch(0) + job.feed.epoch(1))[:5]:
        strategy.step([batch], rate=LR, leave=False)
    own = strategy.state_dict().own
    assert own["piece"] and own["rounds"]["done"] == 2
    owns = trial.world.allgather_object(own, name="test.owns")
    strategy.check(step=5)
    whole = {name: parameter.detach() for name, parameter in strategy.whole.named_parameters()}
    for size in (1, trial.world.size, trial.world.size + 1):
        states = list(strategy.repartitioned(owns, size=size, restep=lambda step: step))
        assert len(states) == size and all(not state["piece"] for state in states)
        assert all(state["rounds"]["done"] == 0 and state["rounds"]["ended"] == 2 for state in states)
        for name, parameter in whole.items():
            dimension = 1 if name.startswith("head") else 0
            joined = torch.cat([state["owned"][name] for state in states], dimension)
            assert torch.equal(joined, parameter), f"{name} on {size} ranks"


def check_a_run_goes_on_at_the_end_of_an_epoch_and_in_the_middle_of_a_round(trial: Trial) -> None:
    """With the trunk's features cached; looking, and the cache, change nothing."""
    given = {"local_steps": STEPS, "momentum": 0.9, "schedule": "cosine"}
    given |= {"model": "resnet20", "head": "mlp-12x8", "augment": "views:2", "image_size": 16}
    configure = partial(trial.config, **given, cache="on", checkpoint_every="3steps")
    looked = ["subnets", "other_collective_bytes"]
    # A run that is asked to leave does so at a round's end. At an epoch's end, the model has not been evaluated yet:
    # BatchNorm's statistics are those of the batches before.
    straight = see_that_stopped_runs_go_on(configure, trial.world, [STEPS - 1], part="subnets", without=looked)
    assert straight["cache"]["rows_read"] > 0 and straight["cut_history"] == [[0, 0, 4]]
    # After the checkpoint of step 6, a killed run continues from there.
    killed(configure("killed"), trial.world, after=7)
    unseen = run(trial.config("unseen", **given, cache="off"), trial.world)
    resumed = run(configure("killed", resume=True), trial.world)
    assert unseen["parameter_digest"] == straight["parameter_digest"], "a cache or a checkpoint changed the training"
    assert resumed["parameter_digest"] == straight["parameter_digest"], "a run resumed in the middle of a round differs"
    if trial.world.rank == 0:
        said = (trial.root / f"stop-{STEPS - 1}" / "log.txt").read_text()
        assert f"resumed after step {STEPS}" in said, "it left before the round's end"
        seen, expected = (record_of(trial.root / name, without=looked) for name in ("killed", "straight"))
        assert seen == expected


def check_a_rank_holds_its_part_alone(trial: Trial) -> None:
    """While rounds last, the whole MLP has no memory, and the pieces are those of the formula."""
    job = prepare(trial.config("parts"), trial.world)
    strategy: Any = job.strategy
    for batch in job.feed.epoch(0)[:2]:
        strategy.step([batch], rate=LR, leave=False)
        assert sum(parameter.numel() for parameter in strategy.whole.parameters()) == 0
    report = strategy.report()["subnets"]
    mine = sum(parameter.nbytes for parameter in strategy.piece.mlp.parameters())
    assert report["piece_bytes"][trial.world.rank] == mine
    owned = sum(tensor.nbytes for tensor in strategy.exchange.owned.values())
    assert report["owned_bytes"][trial.world.rank] == owned
    whole = sum(p.nbytes for p in Mlp(3 * 32 * 32, (13, 10), 10).parameters())
    assert sum(report["owned_bytes"]) == whole and max(report["piece_bytes"]) < whole
    strategy.check(step=2)
    assert sum(parameter.nbytes for parameter in strategy.whole.parameters()) == whole
    strategy.step([job.feed.epoch(0)[2]], rate=LR, leave=False)
    assert sum(parameter.numel() for parameter in strategy.whole.parameters()) == 0


setting = Trial
