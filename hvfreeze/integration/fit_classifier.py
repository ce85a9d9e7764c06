"""`hvfreeze.fit_classifier`: a kernel ridge regression head on the features of all blocks, over all ranks' samples.

    fitted = hvfreeze.fit_classifier(model, loader)
    logits = fitted.classifier.eval()(images)

It is the head that `hvfreeze auto` ends with, for a Horovod script or a single process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.config.head import TOKENS
from hvfreeze.errors import UsageError
from hvfreeze.heads.features import before_last_layer
from hvfreeze.heads.kernel import PENALTIES, fit_kernel
from hvfreeze.heads.multilevel import MultiLevelClassifier, take
from hvfreeze.heads.solution import Solution
from hvfreeze.heads.solve import solver_memory
from hvfreeze.integration.fit_head import checked, weighted_rows
from hvfreeze.integration.samples import Split, inputs_and_labels
from hvfreeze.integration.script_world import report_errors, script_world
from hvfreeze.model.blocks import cut_into_blocks
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.tasks import TASKS


class FittedClassifier(NamedTuple):
    """A fitted classifier, and the numbers of its fit."""

    classifier: MultiLevelClassifier
    """From images to logits, the same on all ranks. It shares its blocks, and their mode, with the model."""
    fit: Solution
    """The numbers of the fit; `fit.chosen` has the held-out loss and accuracy (R^2 of numbers)."""


def fit_classifier(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    outputs: int | None = None,
    task: str = "classes",
    class_weights: str | Sequence[float] | None = None,
    sample_weight: Tensor | Sequence[float] | None = None,
    flips: bool = False,
    pool: int = 4,
    tokens: str = "mean",
    blocks: str = "stage",
    penalty: float | None = None,
    split: Split = inputs_and_labels,
    process_set: Any = None,
) -> FittedClassifier:
    """Fit a head on the features of all blocks to the samples of all ranks' loaders. Collective.

    The head is kernel ridge regression, as in `hvfreeze auto`. The blocks run once, in evaluation mode, and stay as
    they are. The features of a rank's samples are kept in its memory: 4 bytes x samples x features.

    Args:
        model: a replicated classifier of images; wrappers with `module` are opened.
        loader: gives this rank's batches; every rank has its own samples, as with a `DistributedSampler`.
        outputs: classes, labels or numbers; None takes those of the model's last layer.
        task: as for `fit_head`, and `class_weights` and `sample_weight` too.
        flips: whether the head is also fitted to horizontal flips of the images.
        pool: maximum cells per side that a block's map is averaged to.
        tokens: features of a transformer's tokens: their `mean`, the `class` token, or a `grid` of patches.
        blocks: how the model is cut, as --blocks.
        penalty: ridge penalty, above 0; None chooses one by held-out samples or leave-one-out.
        split: divides a batch into images and labels.
        process_set: Horovod process set; None is all ranks.

    Raises:
        UsageError: the model cannot be cut into blocks that run one after another, or labels do not suit it; on all
            ranks.
        NumericsError: a feature is NaN or infinite; on all ranks.
    """
    world = script_world(process_set)
    report_errors(world)
    if task not in TASKS:
        raise UsageError(f"task ({task}) must be one of {', '.join(TASKS)}").on_all_ranks()
    if tokens not in TOKENS:
        raise UsageError(f"tokens ({tokens}) must be one of {', '.join(TOKENS)}").on_all_ranks()
    whole, found = getattr(model, "module", model), list[MultiLevelClassifier]()

    def see() -> tuple[Tensor, Tensor]:
        features, labels = list[Tensor](), list[Tensor]()
        with state_kept(whole), in_evaluation(whole), torch.no_grad():
            for batch in loader:
                images, truth = split(batch)
                if not isinstance(images, Tensor):
                    raise UsageError("fit_classifier: a batch has no tensor of images; give split= to take it apart")
                if not found:
                    # Two images: with a single one, the batch dimension is ambiguous.
                    example = images[:2] if len(images) > 1 else torch.cat([images, images])
                    chain = cut_into_blocks(whole, scheme=blocks, example=example)
                    classes = before_last_layer(chain)[1].out_features if outputs is None else outputs
                    found.append(
                        MultiLevelClassifier(
                            chain,
                            classes=classes,
                            pool=pool,
                            example=example,
                            kernel=True,
                            tokens=tokens,
                        )
                    )
                views = (images, images.flip(3)) if flips else (images,)
                features.append(torch.stack([found[0].features(view) for view in views], 1))
                shape = torch.Size((len(images), found[0].head.out_features))
                labels.append(checked(torch.as_tensor(truth), shape, task))
        if not features:
            raise UsageError("fit_classifier: the loader of this rank has no batches; every rank needs one at least")
        return torch.cat(features), torch.cat(labels)

    features, labels = raise_on_all_ranks(world, see, name="head.features")
    classifier = found[0]
    answers = TASKS[task](classifier.head.out_features)
    answers, rows = weighted_rows(features, labels, class_weights, sample_weight, answers, world)
    del features
    fit = fit_kernel(
        rows,
        task=answers,
        world=world,
        memory_bytes=solver_memory(world.local_size),
        penalties=PENALTIES if penalty is None else [penalty],
    )
    assert fit is not None, "a fit without `watch` runs to its end"
    take(classifier.head, fit)
    return FittedClassifier(classifier, fit.numbers())
