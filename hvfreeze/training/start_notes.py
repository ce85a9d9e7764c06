"""Notes at the start of a run: on freezing, memory, horizontal flips and imbalanced classes."""

from __future__ import annotations

import numpy as np
import torch

from hvfreeze.config.data import TEXT
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import Corpus
from hvfreeze.data.class_shares import majority_of
from hvfreeze.data.data_sets import ImageSet
from hvfreeze.effects import Plan
from hvfreeze.heads.flips import WAY_OUT, Finding
from hvfreeze.heads.kernel import ALL_COMPARED
from hvfreeze.model.activation_memory import note_on_memory
from hvfreeze.model.weight_names import has_published
from hvfreeze.training.blueprint import Blueprint
from hvfreeze.training.job import Job
from hvfreeze.training.parts import Factory


def notes_on_freezing(config: Config, plan: Plan) -> list[str]:
    """Return notes on frozen blocks and on random weights."""
    settings, trains = config.freeze, bool(plan.trained)
    # If --epochs was given, another note says that it has no effect.
    is_silent = settings.auto and not trains and "epochs" not in plan.asked.given
    notes = [f"no fine-tuning: {plan.solves_alone}"] if is_silent else []
    if config.model.weights != "none":
        return notes
    if settings.auto:
        does = "training from scratch" if trains else "fitting a head to a network with random weights"
        way = "DEFAULT" if has_published(config.model.model) else "FILE"
        return [*notes, f"no --weights: {does}; --weights {way} starts from pretrained weights"]
    if settings.cut and not settings.auto:
        keep = "block keeps its" if settings.cut == 1 else f"{settings.cut} blocks keep their"
        return [f"the first {keep} random initialisation; freezing is for trained --weights"]
    return []


def notes_on_memory(job: Job, blueprint: Blueprint) -> list[str]:
    """Return, on rank 0, a note if a batch of images needs more memory than its machine has."""
    settings, world = job.config, job.world
    if world.rank > 0 or settings.strategy.strategy != "replicas" or len(blueprint.image_shape) != 3:
        return []
    model, batch = job.factory.context.chain.model, settings.optimizer.batch_size
    return note_on_memory(model, blueprint.image_shape, batch_size=batch, ranks=world.local_size)


def notes_on_flips(settings: Config, image_set: ImageSet, finding: Finding | None) -> list[str]:
    """Return a note on horizontal flips; `finding` is the result of the trial with and without them."""
    if finding is not None:
        return [finding.line()]
    if not settings.data.mirrors(image_set.flips):
        return []
    if settings.data.flips == "mean":
        return [f"horizontal flips: the head averages the features of each image and its flip; {WAY_OUT}"]
    shows = settings.head.solved or settings.data.augment != "none"
    return [f"horizontal flips: on; {WAY_OUT}"] if shows else []


def notes_on_mean(factory: Factory, settings: Config) -> list[str]:
    """Return a note on a head that averages over flips in predictions."""
    if not settings.head.solved or factory.with_affordable_flips(settings) == settings:
        return []
    found = f"more than {ALL_COMPARED:,} rows with flips: the head averages the features of each image and its flip"
    return [f"{found}, so predictions take 2x longer; use --flips off to disable"]


def shares_of_classes(config: Config, corpus: Corpus) -> tuple[float | None, list[str]]:
    """Return the share of the most frequent training class, and a note, if classes are imbalanced.

    Text has no classes, and several labels per sample are not compared.
    """
    if config.data.data == TEXT or config.strategy.tasks is not None or corpus.train.kind != "classes":
        return None, []
    classes, found = corpus.train.classes, {}
    held = "held-out" if config.data.validation_fraction > 0 else "test"
    parts = {
        "training": (corpus.train, np.unique(np.concatenate(corpus.plan.shards))),
        held: (corpus.evaluated, corpus.evaluated_ids),
    }
    for part, (image_set, ids) in parts.items():
        labels = image_set.labels[torch.from_numpy(ids)]
        found[part] = majority_of(torch.bincount(labels, minlength=len(classes)))
    told = " and ".join(
        f"{share[1]:.1%} of the {part} samples have class {classes[share[0]]}".replace("%", " %")
        for part, share in found.items()
        if share is not None
    )
    note = (
        f"classes are imbalanced: {told}; always predicting this class would have that accuracy, so the "
        f"log also shows balanced accuracy (the mean recall of all classes)"
    )
    if config.optimizer.class_weights == "none" and found["training"]:
        note += "; use --class-weights balanced to weight rare classes more"
    training = found["training"]
    return training and training[1], [note] if told else []
