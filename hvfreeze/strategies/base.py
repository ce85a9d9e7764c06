"""The interface between the training loop and a parallelization strategy.

A strategy decides which rank holds which part of the chain, and what ranks send each other. The loop does what all
strategies share: epochs, the learning rate, sums of loss and accuracy, the run's record, evaluations and checkpoints.
docs/internals/strategies.md explains how to write a new strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.config.cache import CacheConfig
from hvfreeze.data.batches import Batch, Corpus, TrainFeed
from hvfreeze.data.decoding import Inputs
from hvfreeze.errors import NumericsError
from hvfreeze.freezing.cadence import Length
from hvfreeze.freezing.vote import Decision
from hvfreeze.model.blocks import Chain
from hvfreeze.prefix.splits import Split
from hvfreeze.runs.clock import PhaseClock


@dataclass(frozen=True, kw_only=True, eq=False)
class BuildContext:
    """Everything that a strategy is built from; the model's parameters are equal on all ranks."""

    world: World
    replica: int
    """This rank's share of the samples: all ranks of a replica use the same batches."""
    chain: Chain
    build: Callable[[int], Chain]
    """Builds the same model for another number of classes, initialised from torch's generator."""
    corpus: Corpus
    feed: TrainFeed
    evaluated: Inputs
    """The images or windows of this replica's share of the evaluation samples."""
    directory: Path
    """The run directory."""
    clock: PhaseClock
    say: Callable[[str], None]
    """Logs a line for the user; does nothing except on rank 0."""
    length: Length
    """Length of the part of the run that the strategy is built for."""
    fused: bool = False
    """Whether the program chose the optimizer, so that updates may be rounded differently from plain PyTorch's."""

    def trained(self, *, passes_per_epoch: float = 1.0) -> Split:
        """Return this replica's training samples, all of which are used `passes_per_epoch` times per epoch."""
        return Split(
            name="train",
            image_set=self.corpus.train,
            images=self.feed.images,
            ids=self.corpus.plan.owned(self.replica),
            passes_per_epoch=passes_per_epoch,
        )

    def tested(self, *, passes_per_epoch: float = 1.0) -> Split:
        """Return this replica's evaluation samples."""
        return Split(
            name="test",
            image_set=self.corpus.evaluated,
            images=self.evaluated,
            ids=self.corpus.share(self.replica),
            passes_per_epoch=passes_per_epoch,
            padded=True,
        )

    def cache_directory(self, settings: CacheConfig) -> Path:
        """Return the directory of the run's cache."""
        return Path(settings.cache_dir) if settings.cache_dir else self.directory / "cache"


MODEL = "model"
"""The name of the model, and of its file, in strategies that train one model."""


class Answers(NamedTuple):
    """A model's logits for a batch, (B, classes) float32 without gradient, and the labels, (B,) int64.

    For windows of T characters their shapes are (B, classes, T) and (B, T).
    """

    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class StepResult:
    """The results of a step for the loop."""

    losses: Mapping[str, float]
    """Mean loss over the batches, by model; for models of other ranks the loss that these computed."""
    answers: Mapping[str, Answers]
    """Answers of this rank's models, from before the update."""
    leave: bool
    """Whether some rank was asked to leave; equal on all ranks."""
    decision: Decision | None = None
    """The vote held after the update, if any; equal on all ranks."""

    @property
    def loss(self) -> float:
        """Mean loss over this rank's models, 0 if it has none."""
        return sum(self.losses.values()) / max(1, len(self.losses))


def not_finite(step: int, what: str, remedy: str) -> NumericsError:
    """Return the error of a step whose loss or gradients contain NaN or Inf."""
    return NumericsError(
        f"step {step}: {what}; the model was not updated; {remedy}, and resume from the last checkpoint"
    )


class State(NamedTuple):
    """A strategy's state for a checkpoint: plain values and tensors."""

    shared: dict[str, Any]
    """State that is equal on all ranks, or known to rank 0 only; rank 0's is saved."""
    own: dict[str, Any]
    """This rank's own state, which is loaded on the same rank."""


class WholeModel(NamedTuple):
    """A model as it is saved."""

    name: str
    state: dict[str, Tensor]
    """Its state_dict on rank 0, with the names of the original model; may be empty on other ranks."""
    classes: tuple[str, ...] | None = None
    """The classes of its outputs; None is those of the data set."""
    exits: tuple[int, ...] = ()
    """The blocks before which it has early exits, see `hvfreeze.model.early_exits`."""


class OpenModel(Protocol):
    """One or several models, held by all ranks together. Every method is a collective unless it says otherwise."""

    @property
    def cut(self) -> int:
        """The number of frozen blocks. Not a collective."""

    @property
    def models(self) -> Sequence[str]:
        """Names of the trained models, equal on all ranks and valid file names. Not a collective."""

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Prepare for these batches, in this order: of training steps, or of predictions."""

    def settle(self) -> None:
        """Synchronize every model, with running statistics, to the state that is evaluated and saved; idempotent."""

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the answers of this rank's models in evaluation mode, without side effects. Not always a collective.

        The batch is one of this replica's share of the evaluation samples; batches may come in any order.
        """

    def check(self, *, step: int) -> str:
        """Return the digest of all models' parameters and buffers, equal on all ranks; call it after `settle`.

        Raises:
            DivergedError: values that must be equal differ between ranks; `step` is for the message.
        """

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield each model; rank 0 need not hold two at once. All ranks must exhaust the iterator, after `settle`."""

    def state_dict(self) -> State:
        """Return the state from which training continues bit for bit. Not a collective."""

    def load_state_dict(self, state: State) -> None:
        """Load the state of the same rank of a world of the same size. Not a collective."""

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Convert the saved state to `size` ranks, and yield each rank's own state. Not a collective: rank 0 calls it.

        Training continues from the same models and optimizer states, but not bit for bit.

        Args:
            owns: `State.own` of the former ranks, in order; each may be read once.
            size: the new number of ranks.
            restep: converts a number of steps to epochs of another length.
        """

    def report(self) -> dict[str, Any]:
        """Return the strategy's entries in summary.json; an epoch's line has the same, except `cut_history`.

        Keys: `cut_history` (a list of `Move`), `allreduce_bytes`, `other_collective_bytes`, `cache`, and the strategy's
        own. Equal on all ranks.
        """

    def close(self) -> None:
        """Publish cached rows, and close files and threads; idempotent. Not a collective."""


class Strategy(OpenModel, Protocol):
    """One or several models that all ranks train together."""

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Make one optimizer step with learning rate `rate`, and hold a vote if one is due.

        Args:
            batches: this replica's, several with --accumulate; the step uses the mean over all of them.
            rate: the learning rate of this update.
            leave: this rank was asked to leave after this step.

        Raises:
            NumericsError: NaN or Inf in a loss or gradient on some rank, before the update; on all ranks, or only on
                that rank if ranks train alone in rounds.
            DivergedError: ranks that must be equal differ.
        """
