"""The interface between the training loop and a strategy.

A strategy decides which rank holds which part of the chain and what crosses between ranks. The loop keeps what is the
same for all of them: epochs, the learning rate, sums of loss and accuracy, the run's record, when to evaluate and
when to write a checkpoint. docs/internals/strategies.md tells how to write a new strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hvfreeze.comm.world import World
from hvfreeze.config.sections import CacheConfig
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
    """What every strategy is built from; the model's parameters are equal on all ranks."""

    world: World
    replica: int
    """This rank's share of the samples: all ranks of a replica see the same batches."""
    chain: Chain
    build: Callable[[int], Chain]
    """Builds the same model for another number of classes, initialised from torch's generator."""
    corpus: Corpus
    feed: TrainFeed
    evaluated: Inputs
    """The images, or windows, of this replica's share of the evaluation samples."""
    directory: Path
    """The run's."""
    clock: PhaseClock
    say: Callable[[str], None]
    """Tells the user a line; does nothing but on rank 0."""
    length: Length
    """How long the stage lasts that the strategy is built for."""
    fused: bool = False
    """Whether the optimizer is the program's choice, whose updates may be rounded otherwise than plain PyTorch's."""

    def trained(self, *, passes_per_epoch: float = 1.0) -> Split:
        """Return this replica's training samples, all of which an epoch asks for `passes_per_epoch` times."""
        return Split(
            name="train",
            image_set=self.corpus.train,
            images=self.feed.images,
            ids=self.corpus.plan.owned(self.replica),
            passes_per_epoch=passes_per_epoch,
        )

    def tested(self, *, passes_per_epoch: float = 1.0) -> Split:
        """Return the same of the samples that this replica evaluates."""
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
"""The name of the one model that most strategies train, and of its file."""


class Answers(NamedTuple):
    """A model's logits for a batch, (B, classes) float32 without gradient, and the labels, (B,) int64.

    For windows of T characters they are (B, classes, T) and (B, T).
    """

    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class StepResult:
    """A step's results for the loop."""

    losses: Mapping[str, float]
    """By model, the mean over the batches; for models of other ranks the loss that these found."""
    answers: Mapping[str, Answers]
    """Of the models that this rank answers for, from before the update."""
    leave: bool
    """Some rank was asked to leave; equal on all ranks."""
    decision: Decision | None = None
    """The vote that was held after the update, if one was; equal on all ranks."""

    @property
    def loss(self) -> float:
        """The mean over this rank's models, 0 where it has none."""
        return sum(self.losses.values()) / max(1, len(self.losses))


def not_finite(step: int, what: str, remedy: str) -> NumericsError:
    """Return the error of a step that was made with numbers which are not finite."""
    return NumericsError(f"step {step}: {what}; no update was made; {remedy}, and go on from the last checkpoint")


class State(NamedTuple):
    """A strategy's state, for a checkpoint: plain values and tensors."""

    shared: dict[str, Any]
    """Equal on all ranks, or known to rank 0 alone; rank 0's is kept."""
    own: dict[str, Any]
    """This rank's, which comes back to this rank."""


class WholeModel(NamedTuple):
    """A model as it is kept."""

    name: str
    state: dict[str, Tensor]
    """On rank 0 its state_dict, with the names of the given model; on other ranks perhaps empty."""
    classes: tuple[str, ...] | None = None
    """What its outputs stand for; None is the data set's own classes."""
    exits: tuple[int, ...] = ()
    """The blocks before which it has exits too, see `hvfreeze.model.early_exits`."""


class OpenModel(Protocol):
    """A model, or several, that all ranks hold together; every method is a collective unless it says otherwise."""

    @property
    def cut(self) -> int:
        """Number of frozen blocks. Not a collective."""

    @property
    def models(self) -> Sequence[str]:
        """Names of the models that are trained, the same on all ranks; fit for files. Not a collective."""

    def begin_epoch(self, batches: Sequence[Batch], *, training: bool = True) -> None:
        """Get ready for these batches, in this order: of training steps, or of predictions."""

    def settle(self) -> None:
        """Bring every model into the state that is evaluated and kept, its running statistics too; idempotent."""

    def predict(self, batch: Batch) -> Mapping[str, Answers]:
        """Return the answers of this rank's models in evaluation mode; changes nothing. Not always a collective.

        The batch is one of this replica's share of the evaluation samples; batches may come in any order.
        """

    def check(self, *, step: int) -> str:
        """Return the digest of all models, parameters and buffers, equal on all ranks, when the strategy has settled.

        Raises:
            DivergedError: ranks hold different values of what must be equal; `step` is for the message.
        """

    def whole_models(self) -> Iterator[WholeModel]:
        """Yield each model; rank 0 need not hold two at once. To be exhausted by all ranks, after settling."""

    def state_dict(self) -> State:
        """Return what a checkpoint must hold so that training goes on bit for bit. Not a collective."""

    def load_state_dict(self, state: State) -> None:
        """Continue from the state of the same rank of a world of the same size. Not a collective."""

    def repartitioned(
        self, owns: Iterable[dict[str, Any]], *, size: int, restep: Callable[[int], int]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each of `size` ranks, in order, the own state with which another number of ranks goes on.

        Training goes on from the same models and optimizer states, not bit for bit. Not a collective: rank 0 calls it.

        Args:
            owns: `State.own` of the former ranks, in order; each is to be read once.
            size: how many ranks there are.
            restep: turns a number of steps into that of an epoch of another length.
        """

    def report(self) -> dict[str, Any]:
        """Return the strategy's entries of summary.json, and but for `cut_history` of an epoch's line.

        Keys: `cut_history` (a list of `Move`), `allreduce_bytes`, `other_collective_bytes`, `cache`, and the strategy's
        own. Equal on all ranks.
        """

    def close(self) -> None:
        """Keep what is worth keeping and let go of files and threads; idempotent. Not a collective."""


class Strategy(OpenModel, Protocol):
    """How a chain is trained by all ranks together."""

    def step(self, batches: Sequence[Batch], *, rate: float, leave: bool) -> StepResult:
        """Make one optimizer step with learning rate `rate`, and vote where a vote is due.

        Args:
            batches: this replica's, one unless it accumulates; the step is that of the mean over all of them.
            rate: the learning rate of this update.
            leave: this rank was asked to leave after this step.

        Raises:
            NumericsError: a loss or gradient is not finite on some rank; raised on all ranks, before the update.
            DivergedError: ranks that must be equal are not.
        """
