"""`hvfreeze.fit_head`: a script's last layer, fitted to the features of all ranks' samples.

    hvfreeze.fit_head(model, loader)

The fit is logistic regression for classes and labels, and ridge regression for numbers. Call it before, between or
after epochs, in a Horovod script or a single process. If the model is replicated on all ranks, its last layer is the
same on all of them afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.data.shards import split_held_out
from hvfreeze.errors import UsageError
from hvfreeze.heads.linear import PENALTIES, fit_linear
from hvfreeze.heads.multilevel import take
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.heads.solution import Solution
from hvfreeze.integration.samples import Split, inputs_and_labels
from hvfreeze.integration.script_world import report_errors, script_world
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.model.traced import call
from hvfreeze.row_weights import class_weights, find_odd_weight
from hvfreeze.tasks import TASKS, Classes, Task

HELD_OUT = 0.1
"""Share of the samples that chooses the penalty, as in `hvfreeze auto`."""


def fit_head(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    task: str = "classes",
    class_weights: str | Sequence[float] | None = None,
    sample_weight: Tensor | Sequence[float] | None = None,
    penalty: float | None = None,
    split: Split = inputs_and_labels,
    process_set: Any = None,
) -> Solution:
    """Fit the last layer of `model` to the samples of all ranks' loaders; return the fit's numbers. Collective.

    The layer gets the weights that minimise the loss with a ridge penalty on standardised features, the same on all
    ranks. A tenth of the samples chooses the penalty, then all are fitted. The blocks before it run once, in evaluation
    mode, and stay as they are. The features of a rank's samples are kept in its memory.

    Args:
        model: a replicated classifier that ends in an `nn.Linear` with a bias; wrappers with `module` are opened.
        loader: gives this rank's batches; every rank has its own samples, as with a `DistributedSampler`.
        task: `classes` for int64 labels (B,), `labels` for any number of them, (B, outputs) of 0 and 1, or `numbers`
            for regression, (B, outputs) or (B,) for one output.
        class_weights: weights of the classes for the task `classes`: a number per class, or `balanced` for inverse
            frequencies. None is 1 for all.
        sample_weight: weights of this rank's samples, (N,), in the order of its loader, at least 0. A sample of weight
            2 counts twice; a sample of weight 0 is excluded.
        penalty: ridge penalty, above 0; None chooses one by held-out samples or cross-validation.
        split: divides a batch into inputs and labels.
        process_set: Horovod process set; None is all ranks.

    Returns:
        The penalty, and in `chosen` the held-out loss and accuracy (R^2 of numbers) of a fit to the other samples.

    Raises:
        UsageError: the model does not end in such a layer, or labels do not suit it; on all ranks.
        NumericsError: a feature is NaN or infinite; on all ranks.
    """
    world = script_world(process_set)
    report_errors(world)
    if task not in TASKS:
        raise UsageError(f"task ({task}) must be one of {', '.join(TASKS)}").on_all_ranks()
    whole = getattr(model, "module", model)
    layer, features, labels = raise_on_all_ranks(world, lambda: see(whole, loader, task, split), name="head.features")
    answers = TASKS[task](layer.out_features)
    answers, rows = weighted_rows(features[:, None], labels, class_weights, sample_weight, answers, world)
    fit = fit_linear(rows, task=answers, world=world, penalties=PENALTIES if penalty is None else [penalty])
    assert fit is not None, "no rank stops it"
    take(layer, fit)
    return fit.numbers()


def see(model: nn.Module, loader: Iterable[Any], task: str, split: Split) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return the last layer, its inputs, (N, D) float32, for all samples of this rank's loader, and their labels."""
    last: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        last[:] = [(layer, given[0], output)]

    linear = [module for module in model.modules() if type(module) is nn.Linear]
    handles = [module.register_forward_hook(note) for module in linear]
    features, labels = list[Tensor](), list[Tensor]()
    try:
        with state_kept(model), in_evaluation(model), torch.no_grad():
            for batch in loader:
                inputs, truth = split(batch)
                last.clear()
                output = call(model, inputs)
                output = getattr(output, "logits", output)
                if not last or last[0][2] is not output or last[0][0].bias is None or output.dim() != 2:
                    raise UsageError(
                        f"fit_head: {type(model).__name__} does not end in an nn.Linear with a bias whose output, "
                        "(B, outputs), it returns; give its logits, without a softmax after them"
                    )
                features.append(last[0][1].float().clone())
                labels.append(checked(torch.as_tensor(truth), output.shape, task))
    finally:
        for handle in handles:
            handle.remove()
    if not features:
        raise UsageError("fit_head: the loader of this rank has no batches; every rank needs one at least")
    return last[0][0], torch.cat(features), torch.cat(labels)


def checked(labels: Tensor, shape: torch.Size, task: str) -> Tensor:
    """Return a batch's labels as the task has them, for logits of this shape, (B, outputs)."""
    if task == "classes":
        if labels.shape != shape[:1] or labels.is_floating_point() or not bool((labels >= 0).all()):
            raise UsageError(
                f"fit_head: labels of shape {tuple(labels.shape)}, {labels.dtype}, must be {shape[0]} classes"
            )
        if int(labels.max()) >= shape[1]:
            raise UsageError(f"fit_head: a label is {int(labels.max())}, and the last layer has {shape[1]} outputs")
        return labels.long().clone()
    labels = labels.reshape(-1, 1) if labels.dim() == 1 and shape[1] == 1 else labels
    if labels.shape != shape:
        raise UsageError(
            f"fit_head: labels of shape {tuple(labels.shape)} must have that of the logits, {tuple(shape)}"
        )
    if not bool(labels.isfinite().all()) or (task == "labels" and not bool(((labels == 0) | (labels == 1)).all())):
        raise UsageError(f"fit_head: labels must be {'0 or 1' if task == 'labels' else 'finite numbers'}")
    return labels.float().clone()


def weighted_rows(
    features: Tensor,
    labels: Tensor,
    by_class: str | Sequence[float] | None,
    by_sample: Tensor | Sequence[float] | None,
    task: Task,
    world: World,
) -> tuple[Task, RowsInMemory]:
    """Return the task with class weights, and the rows of this rank's samples with a weight above 0. Collective.

    A tenth of the samples is held out, of each class if it has enough. `features` are (N, V, D), for each view of a
    sample. Weights are those of the class times those of the sample.
    """
    weights = raise_on_all_ranks(world, lambda: checked_weights(by_sample, len(labels)), name="head.sample_weight")
    if by_class is not None:
        task = with_class_weights(task, labels, weights, by_class, world)
        weights = weights * task.class_weights_of(labels, training=False)
    # The product of two small weights may be 0 too.
    kept = weights > 0
    if not bool(kept.all()):
        features, labels, weights = features[kept], labels[kept], weights[kept]
    samples, views = torch.arange(len(labels)), features.shape[1]
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    if len(labels):
        strata = task.strata(labels).numpy()
        held_out[split_held_out(strata, np.arange(len(labels)), fraction=HELD_OUT, seed=0)[1]] = True
        # Classes with one sample on this rank are in none of these.
        others = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        others = others[~held_out[others]]
        held_out[others[: max(0, int(HELD_OUT * len(labels)) - int(held_out.sum()))]] = True
    columns = (labels, held_out, samples * world.size + world.rank, weights)
    return task, RowsInMemory(features.flatten(0, 1), *(column.repeat_interleave(views, 0) for column in columns))


def with_class_weights(
    task: Task, labels: Tensor, weights: Tensor, by_class: str | Sequence[float], world: World
) -> Classes:
    """Return the task with the weights of its classes; `weights`, (N,), are those of the samples. Collective."""
    if not isinstance(task, Classes):
        raise UsageError("class_weights is of task='classes' alone").on_all_ranks()
    if isinstance(by_class, str):
        if by_class != "balanced":
            raise UsageError(f"class_weights ({by_class}) must be balanced, or a number for each class").on_all_ranks()
    else:
        given = torch.tensor(list(by_class), dtype=torch.float32).tolist()
        if len(given) != task.outputs or not all(0 < each < math.inf for each in given):
            raise UsageError(
                f"class_weights ({by_class}) must be {task.outputs} numbers above 0, one for each output of the last "
                "layer"
            ).on_all_ranks()
    # Without samples, bincount ignores the type of the weights.
    mine = torch.bincount(labels, weights.double(), minlength=task.outputs).double()
    counts = world.allreduce_sum(mine, name="head.classes")
    return replace(task, weights=class_weights(counts, by_class))


def checked_weights(given: Tensor | Sequence[float] | None, samples: int) -> Tensor:
    """Return sample weights, (N,) float32; 1 for None. Raises UsageError for invalid ones."""
    if given is None:
        return torch.ones(samples)
    weights = torch.as_tensor(given, dtype=torch.float32)
    if weights.shape != (samples,):
        raise UsageError(
            f"sample_weight of shape {tuple(weights.shape)} must have a number for each of the {samples} samples"
        )
    odd = find_odd_weight(weights.double().numpy())
    if odd is not None:
        raise UsageError(f"sample_weight ({float(weights[odd])}, of sample {odd}) must be a number of at least 0")
    return weights
