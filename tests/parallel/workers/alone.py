"""One rank's runs are plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hvfreeze.comm.replica_sync import parameter_digest
from hvfreeze.comm.world import World
from hvfreeze.training.build import prepare
from hvfreeze.training.run import run
from tests.parallel.workers.checking import as_runs_lay_out, small_shufflenet
from tests.parallel.workers.runs import BATCH, EPOCHS, STEPS, Given, configuration, setting

__all__ = ["setting"]


def check_one_rank_is_plain_pytorch(given: Given) -> None:
    for accumulate in (1, 3):
        see_plain_pytorch(given.world, given.root, accumulate=accumulate)


def check_a_head_is_fitted_in_a_script_and_plain_horovod_trains_beside_it(given: Given) -> None:
    # Horovod is started for the script alone.
    import horovod.torch as hvd

    from tests.parallel.workers.own_scripts import fit_and_train

    try:
        fit_and_train(given.world, "head", least=40.0)
        assert hvd.size() == 1
    finally:
        hvd.shutdown()


def see_plain_pytorch(world: World, root: Path, *, accumulate: int) -> None:
    """Compare one rank's run with the loop that anybody would write."""
    changes = {"schedule": "constant", "accumulate": accumulate}
    config = configuration(root / f"plain-{accumulate}", 1, **changes)
    summary = run(config, world)
    for local_steps in (1, 10) if accumulate == 1 else ():
        alone = configuration(
            root / f"alone-{local_steps}", 1, **changes, strategy="local-sgd", local_steps=local_steps
        )
        assert run(alone, world)["parameter_digest"] == summary["parameter_digest"], f"rounds of {local_steps}"
    job = prepare(configuration(root / f"plain-data-{accumulate}", 1, **changes), world)
    torch.manual_seed(config.run.seed)
    model = as_runs_lay_out(small_shufflenet)(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    model.train()
    for epoch in range(EPOCHS):
        batches = job.feed.epoch(epoch)
        for first in range(0, STEPS, accumulate):
            group = batches[first : first + accumulate]
            optimizer.zero_grad()
            for batch in group:
                loss = nn.functional.cross_entropy(model(job.feed.images.load(batch.ids, batch.views)), batch.labels)
                (loss / len(group)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert parameter_digest(model) == summary["parameter_digest"], "one rank is not plain PyTorch"
    assert summary["steps"] == EPOCHS * -(-STEPS // accumulate)
    images = summary["images_per_second"] * summary["train_seconds"]
    assert abs(images - EPOCHS * STEPS * BATCH) < 0.01, "images of some batches were not counted"
