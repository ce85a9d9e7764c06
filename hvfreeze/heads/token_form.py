"""Choose the form in which a head reads a transformer's tokens, once before the recipe, on a few training samples.

For each form a kernel head is fitted to the features of all blocks, with the leave-one-out loss of
`hvfreeze.heads.flips`. The form with the least loss wins; test samples are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.data.batches import TrainFeed, announce, padded_batches
from hvfreeze.data.decoding import Images
from hvfreeze.data.views import Augment
from hvfreeze.heads.features import every_block, token_forms
from hvfreeze.heads.flips import POOL, leave_one_out, own_samples, some_samples
from hvfreeze.heads.rows import RowsInMemory
from hvfreeze.model.blocks import Chain
from hvfreeze.model.modes import in_evaluation, state_kept
from hvfreeze.tasks import Task


@dataclass(frozen=True)
class TokenTrial:
    """The leave-one-out loss of each token form, equal on all ranks."""

    losses: dict[str, float]
    samples: int

    @property
    def best(self) -> str:
        """Form with the least loss."""
        return min(self.losses, key=self.losses.__getitem__)

    def line(self) -> str:
        """Return the log line."""
        losses = ", ".join(f"{loss:.3f} {form}" for form, loss in self.losses.items())
        return (
            f"tokens: {self.best} (leave-one-out loss of {self.samples} samples: {losses}); use "
            f"--tokens to choose another"
        )


def try_token_forms(
    chain: Chain, feed: TrainFeed, image_shape: tuple[int, ...], *, task: Task, place: int, world: World
) -> TokenTrial | None:
    """Try the token forms; None if no block returns tokens, or there are too few samples. Collective.

    The model and torch's generator are unchanged. For the arguments see `hvfreeze.heads.flips.find_out`.
    """
    example = torch.zeros(1, *image_shape)
    forms, ids = token_forms(chain, example=example), some_samples(feed)
    if len(forms) < 2 or ids is None:
        return None
    images = feed.images.shown(Augment("none", 1), mirrors=False)
    assert isinstance(images, Images), "text has no head to fit"
    own = own_samples(feed, ids, place)

    def see() -> list[RowsInMemory]:
        reads = [every_block(chain, pool=POOL, example=example, tokens=form) for form in forms]
        columns = [[read(example)[:0]] for read in reads]
        batches = padded_batches(own, images.labels_of, 50)
        announce(images, batches)
        for batch in batches:
            x = images.load(batch.ids, batch.views)
            parts: list[list[torch.Tensor]] = [[] for _ in forms]
            for number, block in enumerate(chain.blocks[:-1]):
                x = block(x)
                for read, found in zip(reads, parts):
                    found.append(read.part(number, x)[: batch.counted])
            for column, found in zip(columns, parts):
                column.append(torch.cat(found, 1))
        samples = torch.from_numpy(own)
        labels = images.labels[samples]
        known = labels, torch.ones(len(own), dtype=torch.bool), samples, task.weights_of(labels, samples)
        return [RowsInMemory(torch.cat(column), *known) for column in columns]

    with state_kept(chain.model), in_evaluation(chain.model), torch.no_grad():
        rows = raise_on_all_ranks(world, see, name="tokens")
    found = leave_one_out(rows, task=task, world=world)
    if found is None:
        return None
    return TokenTrial({form: trial.held_out_loss for form, trial in zip(forms, found)}, len(ids))
