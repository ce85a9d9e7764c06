"""The verbs that recipes call: fine-tune, fit a head, probe, snapshot, restore, finish.

Each verb is a collective and returns a value that is equal on all ranks. The journal records the value of each finished
verb. A resumed run calls its recipe again: recorded verbs return at once, and the interrupted verb continues. So a
recipe must decide only by the settings and these values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hvfreeze.config.data import MOST_VIEWS
from hvfreeze.config.tree import Config, settings_of
from hvfreeze.data.batches import announce
from hvfreeze.errors import NumericsError
from hvfreeze.heads.features import before_last_layer
from hvfreeze.heads.moments import FeaturesError
from hvfreeze.heads.probe import Probe
from hvfreeze.heads.solution import PenaltyTrial, Solution
from hvfreeze.heads.solve import FitTerms
from hvfreeze.metrics import in_words
from hvfreeze.model.modes import in_evaluation, in_precision
from hvfreeze.strategies.base import MODEL
from hvfreeze.tasks import Task
from hvfreeze.training import loop
from hvfreeze.training.budget import Pace
from hvfreeze.training.checkpoint import save_if_due
from hvfreeze.training.evaluation import Kept, Score, Totals, add_metrics, mean, reduce
from hvfreeze.training.job import Job
from hvfreeze.training.parts import HELD_OUT, Part
from hvfreeze.wording import plural


@dataclass(frozen=True)
class FineTuned:
    """The result of `fine_tune`."""

    steps: int
    epochs: int
    is_finite: bool
    """False if NaN or Inf ended training early."""


class Run:
    """The verbs of a run. Every verb is a collective.

    Attributes:
        job: the state of the run.
        budget: the budget of the run.
        settings: the settings of the run.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.budget, self.settings = job, job.budget, job.settings
        self._probe: Probe | None = None
        self._last: Part | None = None
        """The part that the last recalled verb had open."""
        self._recalls = False
        self._thresholds: dict[str, tuple[float, ...]] = {}
        """Label thresholds chosen on held-out samples: of the last head, the network and each snapshot."""

    def fine_tune(
        self,
        settings: Config,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        work: float = 0.0,
        holds_out: bool = False,
        zeroes_last_layer: bool = False,
        may_fail: bool = False,
    ) -> FineTuned:
        """Train the model with one learning-rate schedule, including votes, cache and checkpoints.

        Args:
            settings: optimizer, augmentation, votes and strategy.
            epochs: number of epochs of a whole run, which may have more when it is resumed.
            steps: number of steps, instead of epochs.
            work: work of all steps, instead of epochs. With a time budget, the number of steps depends on their speed.
            holds_out: whether to exclude held-out samples.
            zeroes_last_layer: whether the model's own last layer starts with zeros.
            may_fail: whether NaN or Inf end the verb instead of the run.

        Raises:
            NumericsError: a loss or gradient is NaN or Inf, unless `may_fail`; see `Strategy.step`.
        """
        part, job = Part(settings, holds_out), self.job
        fixed = {} if epochs else {**self._named(settings), "steps": steps, "work": work, "zeroed": zeroes_last_layer}
        table, deadline = self.budget.work, self.budget.deadline(work)
        each = table.step(settings.optimizer.batch_size * settings.optimizer.accumulate)

        def make(continues: bool) -> dict[str, Any]:
            if not continues:
                job.enter(part)
                per_epoch = job.steps_per_epoch
                job.opened.plan(epochs * per_epoch if epochs else steps or max(1, int(work / each)))
                if zeroes_last_layer:
                    zero_last_layer(job)
            elif epochs:
                job.opened.plan(epochs * job.steps_per_epoch)
            pace = None
            if deadline is not None and not (epochs or steps):
                steps_between = job.config.run.evaluate_every * job.steps_per_epoch
                estimated = table.evaluated / self.budget.rate
                pace = Pace(self.budget, deadline, steps_per_evaluation=steps_between, evaluation_seconds=estimated)
            finite = True
            try:
                loop.train_part(job, pace=pace, is_last=not job.config.freeze.auto)
            except NumericsError:
                if not may_fail:
                    raise
                finite, job.totals = False, {}
            return vars(FineTuned(job.part_step, job.part_epoch, finite))

        if epochs and job.journal.at_last and job.journal.ended[-1].value["epochs"] < epochs:
            job.journal.reopen()
        is_last = not job.config.freeze.auto
        return FineTuned(
            **self._do("tune", fixed, make, work=lambda made: made["steps"] * each, part=part, is_last=is_last)
        )

    def fit_head(self, settings: Config, *, is_fine_tuned: bool = False) -> Score:
        """Fit the head to the features of all samples; return its held-out score.

        The score is that of a head fitted without the held-out samples; the head is then fitted to all samples. If the
        fit does not converge, the score has an infinite loss.

        Args:
            settings: head and augmentation.
            is_fine_tuned: whether the network was trained on the samples that are not held out.
        """
        part = Part(settings)

        def make(continues: bool) -> list[Any]:
            if not continues:
                self.job.enter(part)
            fit = fit_opened_head(self.job, is_fine_tuned=is_fine_tuned)
            chosen = fit.chosen
            found = score_of(chosen, self.job.task) if chosen else Score(math.nan, math.nan)
            # A head that has not converged is worse than its loss suggests.
            score = found if fit.converged else Score(math.inf, found.accuracy, thresholds=found.thresholds)
            trained = reduce(self.job.totals, self.job.opened.model.models, self.job.world, name="train")
            self.job.totals = {}
            loss, accuracy = mean(trained)
            numbers = {"train_loss": loss, "train_accuracy": accuracy}
            numbers |= {f"held_out_{name}": value for name, value in found.plain().items()} if chosen else {}
            self.job.images += fit.rows
            self._record("solve", images=fit.rows, **numbers)
            return packed(score)

        arguments = {**self._named(settings), "tuned": is_fine_tuned}
        score = unpacked(self._do("solve", arguments, make, work=lambda _: self.budget.work.head_fit, part=part))
        self._thresholds["head"] = score.thresholds
        return score

    def probe(self, head_fit: Config, fine_tuning: Config, *, is_fine_tuned: bool = True) -> float:
        """Return the held-out loss of a small head on the features of a subset of samples; infinite for NaN or Inf.

        Args:
            head_fit: settings for fitting a head.
            fine_tuning: settings for fine-tuning, which determine the samples and the BatchNorm statistics.
            is_fine_tuned: whether the model is already fine-tuned.
        """

        def make(_: bool) -> float:
            with self.job.clock.within("optimizer"):
                try:
                    probe, chain = self._judge(head_fit, fine_tuning), self.job.factory.context.chain
                    loss = float(probe.loss(chain, is_fine_tuned=is_fine_tuned))
                except NumericsError:
                    loss = math.inf
            self._record("probe", held_out_loss=loss)
            return loss

        arguments = {**self._named(fine_tuning), "tuned": is_fine_tuned}
        return float(self._do("probe", arguments, make, work=lambda _: self.budget.work.probe))

    def fit_last_layer(self, head_fit: Config, fine_tuning: Config) -> None:
        """Fit the model's own last layer to a subset of samples; a random one would degrade the blocks below it."""

        def make(_: bool) -> None:
            with self.job.clock.within("optimizer"), naming_samples(self.job):
                self._judge(head_fit, fine_tuning).fit_last_layer(self.job.factory.context.chain)

        self._do("fit_last_layer", {}, make, work=lambda _: self.budget.work.probe)

    def held_out(self, head_fit: Config) -> Score:
        """Return the held-out score of the model with its own last layer."""

        def make(_: bool) -> list[Any]:
            with self.job.clock.within("optimizer"):
                score = score_held_out(self.job, head_fit)
            found: dict[str, Any] = {f"held_out_{name}": value for name, value in score.plain().items()}
            self._record("held_out", **found)
            # A loss of NaN or Inf is the worst.
            return packed(score if math.isfinite(score.loss) else Score(math.inf, score.accuracy))

        score = unpacked(self._do("held_out", {}, make, work=lambda _: self.budget.work.held_out))
        self._thresholds["network"] = score.thresholds
        return score

    def snapshot(self, name: str) -> None:
        """Save the model's state in memory, replacing an earlier snapshot of that name."""

        def make(_: bool) -> None:
            state = self.job.factory.context.chain.model.state_dict()
            self.job.snapshots[name] = {key: tensor.clone() for key, tensor in state.items()}

        self._do("snapshot", {"name": name}, make)
        self._thresholds[name] = self._thresholds.get("network", ())

    def restore(self, name: str) -> None:
        """Restore the model's state from a snapshot."""

        def make(_: bool) -> None:
            with torch.no_grad():
                self.job.factory.context.chain.model.load_state_dict(self.job.snapshots[name])

        self._do("restore", {"name": name}, make)
        self._thresholds["network"] = self._thresholds[name]

    def finish_with(self, settings: Config | None = None) -> None:
        """Evaluate the final model, in the last verb of a run.

        Args:
            settings: for the network with its own last layer, as `fine_tune` and `restore` leave it; None for the model
                of the last verb.
        """
        part = None if settings is None else Part(settings)
        self.job.thresholds = self._thresholds.get("head" if part is None else "network", ())

        def make(_: bool) -> None:
            if part is not None:
                self.job.enter(part)
            self.job.snapshots.clear()
            model = self.job.opened.model
            with self.job.clock.within("evaluate"):
                model.settle()
                tested = loop.evaluate_now(self.job)
            loop.log_overflow(self.job, mean(tested).loss)
            self._record("finish", tested=tested)

        evaluated = self.budget.work.evaluated if self.budget.seconds is not None else 0.0
        self._do("finish", {"network": part is not None}, make, work=lambda _: evaluated, part=part, is_last=True)

    def verdict(self, head: Score, network: Score | None, head_wins: bool) -> str:
        """Return log text with the network's score and the model to keep, head or network; empty without a network."""
        if network is None:
            return ""
        name, lower = self.job.task.decisive
        is_tie = head.decides is not None and head.decides == network.decides
        better = f"equal {name}, so the lower loss" if is_tie else f"the {'lower' if lower else 'higher'} {name}"
        return f"; network: {network.described}; {better} decides: keeping the {'head' if head_wins else 'network'}"

    def say(self, text: str) -> None:
        """Log a line, unless the last verb was recalled: its line is in the log already."""
        if not self._recalls:
            self.job.logger.info(text + (self.job.beside_majority if "accuracy" in text else ""))

    def load(self) -> None:
        """Load the checkpoint that the run resumes from, if all verbs were recalled. Collective."""
        self._load(self._last)

    def _do(
        self,
        verb: str,
        arguments: dict[str, Any],
        make: Callable[[bool], Any],
        *,
        work: Callable[[Any], float] = lambda value: 0.0,
        part: Part | None = None,
        is_last: bool = False,
    ) -> Any:
        """Return a verb's recorded value; without a record, run the verb and record its value.

        Args:
            verb: name in the journal.
            arguments: plain values that must equal the recorded ones.
            make: runs the verb and returns a plain value; called with True if the verb continues from a checkpoint.
            work: returns the work of the verb from its value.
            part: the part that the verb opens, if any.
            is_last: whether the run ends with the verb.
        """
        job = self.job
        entry = job.journal.recall(verb, arguments)
        self._recalls = entry is not None
        if entry is not None:
            self.budget.recall(entry.budget)
            self._last = part or self._last
            return entry.value
        continues = job.journal.begin(verb, arguments)
        self._load(part if continues else self._last)
        value = make(continues)
        self.budget.end(work(value))
        job.journal.end(value, self.budget.mark())
        if part is not None or is_last:
            save_if_due(job, ends_verb=True, is_last=is_last)
        return value

    def _load(self, part: Part | None) -> None:
        """Load the checkpoint that the run resumes from into the part that was open. Collective."""
        load, self.job.waiting = self.job.waiting, None
        if load is None:
            return
        if part is not None and part != self.job.opened.part:
            self.job.opened.model.close()
            self.job.opened = self.job.factory.open(part)
        load()

    def _judge(self, head_fit: Config, fine_tuning: Config) -> Probe:
        if self._probe is None:
            self._probe = self.job.factory.probe(head_fit, fine_tuning)
        return self._probe

    def _named(self, settings: Config) -> dict[str, Any]:
        """Return the settings that differ from the run's, by flag."""
        ours, theirs = settings_of(self.settings), settings_of(settings)
        return {name: value for name, value in theirs.items() if value != ours[name]}

    def _record(self, verb: str, *, tested: Any = None, images: int = 0, **found: Any) -> None:
        """Write a verb's line of metrics.jsonl. Collective."""
        report = self.job.report()
        numbers = loop.numbers(self.job, found, tested or {}, report, images)
        self.job.record.metrics({"verb": verb, **numbers})


def score_of(trial: PenaltyTrial, task: Task) -> Score:
    """Return the held-out score of a head."""
    found, metrics = Score(trial.held_out_loss, trial.held_out_accuracy), trial.metrics
    if metrics is None:
        return found
    accuracy = metrics.get("accuracy", math.nan)
    decides = task.decides(metrics)
    return found._replace(accuracy=accuracy, metrics=metrics, decides=decides, thresholds=trial.thresholds)


def packed(score: Score) -> list[Any]:
    """Convert a score to plain values."""
    if score.metrics is None and not score.thresholds:
        return [score.loss, score.accuracy]
    return [score.loss, score.accuracy, score.metrics, score.decides, list(score.thresholds)]


def unpacked(found: Sequence[Any]) -> Score:
    """Convert the plain values of `packed` to a score."""
    loss, accuracy, *more = found
    metrics, decides, thresholds = more or (None, None, ())
    return Score(loss, accuracy, metrics=metrics, decides=decides, thresholds=tuple(thresholds))


@contextmanager
def naming_samples(job: Job) -> Iterator[None]:
    """Add the names of the samples to an error about their features."""
    try:
        yield
    except FeaturesError as error:
        raise NumericsError(f"{error}; these are {job.names(error.samples)}") from error


def fit_opened_head(job: Job, *, is_fine_tuned: bool) -> Solution:
    """Fit the head of the open part; leave the run if a signal asks for it. Collective."""
    sampled, others = job.feed.sampled_views()
    batches, passes = [*(sampled or ()), *others], itertools.count(1)
    total = max(1, sum(batch.counted for batch in batches))

    def stop(rows: int, reached: str = "") -> bool:
        note = (
            f"features of {rows} of {total} rows" if rows else f"fitting the head: {reached or f'pass {next(passes)}'}"
        )
        job.progress.step(min(rows or total, total), total, note, even=False)
        return job.asked_to_leave

    totals = Totals()
    terms = FitTerms(job.feed.held_out(HELD_OUT), is_fine_tuned, None if sampled is None else len(sampled))
    with naming_samples(job):
        fit = job.opened.fitted.fit(batches, terms, stop=stop, count=partial(totals.add, task=job.task))
    if fit is None:
        loop.leave(job)
    assert fit is not None, "leaving raises"
    job.totals[MODEL] = totals
    if not job.config.freeze.auto:
        log_fit(job, fit)
    if fit.left_out:
        job.logger.info(
            f"warning: the head ignores {plural(len(fit.left_out), 'sample')}, whose features are far "
            f"from all others: {job.names(fit.left_out)}"
        )
    return fit


def log_fit(job: Job, fit: Solution) -> None:
    """Log a fit of the head. Not a collective."""
    reached = "" if fit.converged else f"; not converged, error at most {100 * fit.error:.0f} %"
    centres = "" if fit.compared_with in (None, fit.rows) else f", {fit.compared_with} centres"
    held_out = fit.chosen
    quality = ""
    if held_out is not None:
        quality = f"; held-out accuracy {100 * held_out.held_out_accuracy:.2f} %{job.beside_majority}"
        quality = quality if held_out.metrics is None else f"; held-out {in_words(held_out.metrics)}"
    job.logger.info(
        f"head fitted: {fit.rows} rows{centres}, ridge penalty {fit.penalty:.2g} (best of {len(fit.trials)}), "
        f"{f'{fit.steps} iterations' if fit.steps else 'closed form'}{quality}{reached}"
    )


def zero_last_layer(job: Job) -> None:
    """Set the model's own last layer to zeros."""
    _, layer = before_last_layer(job.opened.chain)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()


def score_held_out(job: Job, head_fit: Config) -> Score:
    """Return the model's score on all ranks' held-out samples, in the views for fitting a head. Collective."""
    held, context, totals = job.factory.held_out(head_fit), job.factory.context, Totals()
    chain, task, kept = context.chain, context.corpus.task, list[Kept]()
    announce(held.images, held.batches)
    with in_evaluation(chain.model), torch.no_grad():
        for batch in held.batches:
            images = held.images.load(batch.ids, batch.views)
            with in_precision(head_fit.optimizer.precision):
                logits = chain.run(images, 0, len(chain.blocks)).float()[: batch.counted]
            labels = batch.labels[: batch.counted]
            weights = task.weights_of(labels, batch.ids[: batch.counted])
            loss = task.loss(logits.double(), labels, weights)
            totals.add(logits, labels, loss, task=task, weight=float(weights.sum()))
            if task.is_examined:
                kept.append(
                    Kept(MOST_VIEWS * batch.ids[: batch.counted] + batch.views[: batch.counted], task, logits, labels)
                )
    scores = reduce({MODEL: totals}, [MODEL], job.world, name="held-out")
    if task.is_examined:
        scores = add_metrics(scores, {MODEL: kept}, task, job.world, chooses=True)
    return scores[MODEL]
