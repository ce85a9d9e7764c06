"""Kernel ridge regression over all ranks: features stay on their ranks, projected features are gathered.

    fit = fit_kernel(rows, task=Classes(10), world=world, memory_bytes=2**30)
    take(layer, fit)

With the projected features z of the N rows of all ranks, K[i, j] = exp(-|z_i - z_j|^2), W the rows' weights and Y their
targets,

    (K + penalty W^-1) A = Y

determines A uniquely, as in scikit-learn's KernelRidge. Few rows are fitted in closed form, see `leave_one_out`.
For more rows, a subset chooses the penalty in closed form, and conjugate gradients, see `preconditioners`, fit all
rows: with weights for all rows or, if there are many, for a subset of them, the centres. Held-out rows evaluate a fit
to all others, which uses the same products, and calibrate the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.allocator import give_back
from hvfreeze.comm.agreement import raise_on_all_ranks
from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError
from hvfreeze.heads.conjugate_gradients import Solved, solve
from hvfreeze.heads.kernel_products import ROUNDED_FROM, CentreProducts, Gram, Products, gaussian
from hvfreeze.heads.leave_one_out import ClosedForm, fit_few, judge, trial_of
from hvfreeze.heads.moments import check_choice
from hvfreeze.heads.preconditioners import NystromInverse, centres_inverse
from hvfreeze.heads.projection import MOST_COMPONENTS, AllRows, gather_info, gather_projected, project_rows
from hvfreeze.heads.rows import WholeRows
from hvfreeze.heads.solution import PenaltyTrial, Solution
from hvfreeze.tasks import Calibration, Task

PENALTIES = (1.0, 0.3, 0.1, 0.03)
"""Candidate penalties. For 1,000 to 50,000 images of CIFAR-10 the best is within 3 % of the lowest held-out loss."""
TOLERANCE = 0.05
"""Limit of `conjugate_gradients.Solved.error`. With 5,000 and 20,000 images of CIFAR-10, 0.01 changes the accuracy by
at most 0.01 points and takes 1.5 times the steps; 0.1 costs 0.1 to 0.2 points."""
FEW = 1_500
"""Number of rows that are fitted in closed form, in under a second on one core; of more rows, the size of the subset
that chooses the penalty."""
ALL_COMPARED, CENTRES = 50_000, 10_000
"""Number of rows up to which all are centres, and the number of centres for more rows. With fewer centres, accuracy
falls faster than time."""
SAMPLED = 8
"""Rows per centre in the preconditioner; each step then reduces the error to about a third."""


class KernelHead(nn.Module):
    """A kernel head from features, (B, D), to logits, (B, C).

    The logits are bias + the sum over centres z of weight exp(-|P x + p - z|^2).

    `projection` P is (K, D), K = min(D, `MOST_COMPONENTS`), with standardisation and bandwidth folded in; `shift` p is
    (K,), `centres` (N, K), training rows of all ranks, all or some, `weight` (C, N) and `bias` (C,); all float32.
    """

    projection: Tensor
    shift: Tensor
    centres: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        """Take D and C. Before the fit all logits are 0."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        width = min(in_features, MOST_COMPONENTS)
        self.register_buffer("projection", torch.zeros(width, in_features))
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("centres", torch.zeros(0, width))
        self.weight = nn.Parameter(torch.zeros(out_features, 0))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def hold(self, rows: int) -> None:
        """Allocate `rows` centres."""
        self.centres = self.centres.new_zeros(rows, self.centres.shape[1])
        self.weight.data = self.weight.new_zeros(self.out_features, rows)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, float32."""
        # Distances are small differences of large products and would be lost in bfloat16.
        with torch.autocast("cpu", enabled=False):
            projected = functional.linear(features.float(), self.projection, self.shift)
            return functional.linear(gaussian(projected, self.centres), self.weight, self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        centres = state_dict.get(f"{prefix}centres")
        if isinstance(centres, Tensor) and len(centres) != len(self.centres):
            self.hold(len(centres))
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass(frozen=True)
class KernelFit(Solution):
    """A fitted head, bitwise equal on all ranks, except `answers`, `labels` and `used`.

    See `KernelHead` for the other attributes.
    """

    answers: Tensor
    """Logits of this rank's fitted rows, in their order, (B, C) float32."""
    labels: Tensor
    """Labels of these rows, in the form of `rows.RowInfo`."""
    used: Tensor
    """Mask of this rank's rows that were fitted, (rows,) bool."""
    projection: Tensor
    shift: Tensor
    centres: Tensor
    weight: Tensor
    bias: Tensor
    """Bias of the logits, (C,) float32."""


def centres_for(rows: int, asked: int | None) -> int:
    """Return the number of centres: `asked` if given, else all rows up to `ALL_COMPARED`, and `CENTRES` for more.

    It does not depend on time or memory, so that runs are reproducible.
    """
    if asked is None:
        asked = rows if rows <= ALL_COMPARED else CENTRES
    return min(rows, asked)


def fit_kernel(
    rows: WholeRows,
    *,
    task: Task,
    world: World,
    memory_bytes: int,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float = TOLERANCE,
    most_steps: int = 200,
    centres: int | None = None,
    components: int = MOST_COMPONENTS,
    trained: bool = False,
    read: Callable[[int], bool] = lambda rows: False,
    watch: Callable[[str], bool] = lambda note: False,
) -> KernelFit | None:
    """Fit kernel ridge regression to the rows of all ranks; the head is equal on all of them. Collective.

    Return None if a rank stops the fit.

    Args:
        rows: this rank's rows; there may be none.
        task: task of the head.
        world: the ranks.
        memory_bytes: memory for the solver's vectors and for cached kernel values; the others are recomputed for each
            product.
        penalties: candidates above 0; a single one is used as given.
        tolerance: tolerance of conjugate gradients, see `conjugate_gradients.solve`.
        most_steps: limit of conjugate gradients; `KernelFit.converged` is False if it was reached.
        centres: number of centres; None chooses, see `centres_for`.
        components: largest number of components of the features.
        trained: whether the network was trained on the rows that are not held out. Their features then depend on their
            labels, so only held-out rows choose the penalty, even if rows are few.
        read: called with the number of this rank's rows with features; True on any rank stops the fit.
        watch: called often with the progress; True on any rank stops the fit.

    Raises:
        UsageError: several penalties and no held-out rows, penalties that are not above 0, or no rows.
        NumericsError: a feature is NaN or infinite.
    """
    values = list(penalties)
    if not values or not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
        raise UsageError(f"penalties ({values}) must be above 0 and different, at least one")
    mine = project_rows(rows, components=components, world=world, stop=read, no_labels=task.no_labels)
    if mine is None:
        return None
    # Rows are not read again, so the Gram matrix can use their memory.
    rows.forget()
    everyone = gather_info(mine.info, world=world)
    check_choice(int(everyone.held_out.sum()), len(values))
    problem = Problem(mine.rows, everyone, task, tolerance, most_steps, memory_bytes, watch, world)
    few = problem.choose(values, trained=trained)
    if few is None:
        return None
    count = centres_for(len(everyone.samples), centres)
    # The freed memory of features is fragmented, and kernel values do not fit it.
    give_back()
    total = len(everyone.samples)
    fitted: Fitted | None
    if count < total:
        fitted = problem.fit_centres(count, few)
    elif len(few.weights) < total:
        fitted = problem.fit_all(few)
    else:
        fitted = problem.fit_few(few)
    if fitted is None:
        return None
    # The trial on held-out rows replaces that of the subset.
    trials = tuple(
        fitted.trial if fitted.trial and fitted.trial.penalty == trial.penalty else trial for trial in few.trials
    )
    return KernelFit(
        penalty=few.penalty,
        trials=trials if len(values) > 1 else (),
        loss=fitted.loss,
        rows=total,
        steps=fitted.steps,
        passes=mine.passes + fitted.passes,
        error=fitted.error,
        converged=fitted.error <= tolerance,
        exchanged_bytes=fitted.exchanged_bytes,
        compared_with=count,
        left_out=mine.left_out,
        answers=fitted.answers,
        labels=mine.info.labels,
        used=mine.used,
        projection=mine.projection,
        shift=mine.shift,
        centres=fitted.centres,
        weight=fitted.weight,
        bias=fitted.bias,
    )


class Fitted(NamedTuple):
    """The raw result of a fit."""

    centres: Tensor
    """Centres, (M, K)."""
    weight: Tensor
    """Weights of the centres, (C, M) float32."""
    bias: Tensor
    """Bias of the logits, (C,) float32."""
    answers: Tensor
    """Logits of this rank's rows, (B, C) float32."""
    loss: float
    trial: PenaltyTrial | None
    """Held-out result of a fit to all other rows; None without held-out rows."""
    steps: int = 0
    error: float = 0.0
    passes: int = 0
    exchanged_bytes: int = 0


class Found(NamedTuple):
    """The solver's result on rank 0."""

    weights: Tensor
    """Weights A without calibration, (M, C) float32."""
    answers: Tensor
    """Raw outputs K A of all rows, (N, C) float32, or of this rank's."""
    held_out: Tensor | None
    """Raw outputs for the held-out rows of a fit to all others, (H, C) float32."""
    steps: int
    error: float


@dataclass(frozen=True)
class Problem:
    """A kernel ridge regression problem: rows, task and solver settings. All methods are collectives."""

    projected: Tensor
    """Projected features of this rank's rows, (B, K)."""
    rows: AllRows
    task: Task
    tolerance: float
    most_steps: int
    memory_bytes: int
    watch: Callable[[str], bool]
    world: World

    @property
    def measured(self) -> Task:
        """The task with the scale of all rows' targets."""
        return self.task.measured(self.rows.labels, self.rows.weights)

    def choose(self, penalties: Sequence[float], *, trained: bool) -> ClosedForm | None:
        """Return the closed-form fit that chooses the penalty; None if a rank stops it."""
        wants = torch.tensor([int(self.watch("leave-one-out"))], dtype=torch.int32)
        if self.world.allreduce_sum(wants, name="head.stop").item():
            return None
        some = self.rows.part(FEW)
        part = self.rows.only(some)
        projected = gather_projected(self.projected, self.rows, some, world=self.world)

        def choose() -> ClosedForm | None:
            if self.world.rank != 0:
                return None
            choosing = part.held_out if trained and bool(part.held_out.any()) else torch.ones_like(part.held_out)
            task = self.measured
            return fit_few(projected, part, task, penalties, choosing=choosing, whole=bool(some.all()))

        found = raise_on_all_ranks(self.world, choose, name="head.few")
        found = self.world.broadcast_object(found, name="head.choice")
        assert found is not None, "rank 0's"
        return found

    def fit_few(self, found: ClosedForm) -> Fitted:
        """Return the closed-form fit to all rows, which are few."""
        everything = torch.ones_like(self.rows.held_out)
        centres = gather_projected(self.projected, self.rows, everything, world=self.world)
        return self._finished(centres, found.weights, found.answers[self.rows.own], found.calibration, None)

    def fit_all(self, chosen: ClosedForm) -> Fitted | None:
        """Return the fit with all rows as centres; None if a rank stops it."""
        rows, task = self.rows, self.task
        count, copies = len(rows.samples), 1 + self._judges(chosen)
        centres = gather_projected(self.projected, rows, torch.ones_like(rows.held_out), world=self.world)
        beside = self.memory_bytes - solver_bytes(count, copies * task.outputs, leads=self.world.rank == 0)
        gram = Gram(centres, world=self.world, memory_bytes=max(0, beside), watch=self.watch)
        leading = partial(self._lead_all, gram, centres, chosen.penalty, copies)
        found = self.world.broadcast_object(gram.lead(leading), name="head.fit")
        if found is None:
            return None
        return self._judged(centres, found._replace(answers=found.answers[rows.own]), chosen, gram)

    def _lead_all(self, gram: Gram, rows: Tensor, penalty: float, copies: int) -> Found:
        """Run the solver on rank 0, while the other ranks follow."""
        outputs, targets = self.task.outputs, self.measured.targets(self.rows.labels)
        weights = self.rows.weights.double()
        # The first copy of the columns uses all rows, the second one excludes held-out rows.
        roots = [weights.sqrt(), weights.sqrt() * ~self.rows.held_out][:copies]
        scale = torch.stack(roots, 1)[:, :, None]
        inverse = NystromInverse(rows, roots, penalty)
        give_back()

        def scaled(vectors: Tensor) -> Tensor:
            """Multiply each copy of the columns by its roots of weights."""
            return torch.mul(scale, vectors.unflatten(1, (copies, outputs))).flatten(1)

        solved = solve(
            lambda vectors: scaled(gram.times(scaled(vectors)).double()).add_(vectors, alpha=penalty),
            scaled(targets.repeat(1, copies)),
            inverse=inverse.times,
            tolerance=self.tolerance,
            most_steps=self.most_steps,
            report=gram.report_error,
        )
        held_out = None
        if copies > 1:
            held_out = gram.times(roots[1][:, None] * solved.vectors[:, outputs:])[self.rows.held_out]
        root, vectors, residual = roots[0][:, None], solved.vectors[:, :outputs], solved.residual[:, :outputs]
        # The residual gives the outputs without another product.
        answers = targets - (residual + penalty * vectors) / root
        return Found((root * vectors).float(), answers.float(), held_out, solved.steps, solved.error)

    def fit_centres(self, count: int, chosen: ClosedForm) -> Fitted | None:
        """Return the fit with a subset of rows as centres; None if a rank stops it."""
        rows, task, world = self.rows, self.measured, self.world
        kept, penalty, copies = rows.spread(count), chosen.penalty, 1 + self._judges(chosen)
        centres = gather_projected(self.projected, rows, kept, world=world)
        places = torch.full((len(self.projected),), -1)
        places[kept[rows.own]] = rows.places(kept)
        columns = copies * task.outputs
        weights, held_out, labels = rows.weights[rows.own], rows.held_out[rows.own], rows.labels[rows.own]
        beside = self.memory_bytes - centres_bytes(count, columns, rows=len(self.projected), leads=world.rank == 0)
        products = CentreProducts(
            self.projected,
            centres,
            places=places,
            weights=weights,
            held_out=held_out,
            columns=task.outputs,
            rounded=len(rows.samples) >= ROUNDED_FROM,
            world=world,
            memory_bytes=max(0, beside),
            watch=self.watch,
        )
        sampled = rows.spread(min(len(rows.samples), SAMPLED * count))
        some = sampled[rows.own]
        normal = products.normal_matrix(self.projected[some], weights[some]).mul_(len(sampled) / int(sampled.sum()))
        right = products.right_sides(lambda part: task.targets(labels[part]), copies=copies)

        def product(vectors: Tensor) -> Tensor:
            both = products.times(vectors)
            return both[0] + penalty * both[1]

        def leading() -> Solved:
            inverse = centres_inverse(centres, normal, penalty)
            return solve(
                product,
                right,
                inverse=inverse,
                tolerance=self.tolerance,
                most_steps=self.most_steps,
                report=products.report_error,
            )

        solved = world.broadcast_object(products.lead(leading), name="head.fit")
        if solved is None:
            return None
        answers, judged = products.answers(solved.vectors), None
        if copies > 1:
            judged = torch.zeros(int(rows.held_out.sum()), task.outputs)
            judged[rows.places(rows.held_out)] = answers[held_out, task.outputs :]
            judged = world.allreduce_sum(judged, name="head.judged")
        vectors, answers = solved.vectors[:, : task.outputs].float(), answers[:, : task.outputs]
        return self._judged(centres, Found(vectors, answers, judged, solved.steps, solved.error), chosen, products)

    def _judges(self, chosen: ClosedForm) -> bool:
        """Return True if held-out rows evaluate a fit to all others: if there are several penalties and other rows."""
        return len(chosen.trials) > 1 and not bool(self.rows.held_out.all())

    def _judged(self, centres: Tensor, found: Found, chosen: ClosedForm, products: Products) -> Fitted:
        """Return the fit, calibrated by held-out rows if there are any."""
        calibration, trial = chosen.calibration, None
        if found.held_out is not None and self.world.rank == 0:
            task, held, said = self.measured, self.rows.only(self.rows.held_out), found.held_out
            calibration, _ = judge(task, said.double(), held)
            trial = trial_of(task, chosen.penalty, said.double(), held, steps=found.steps, whole=True)
        # Processors may round differently: all ranks use rank 0's choice.
        calibration, trial = self.world.broadcast_object((calibration, trial), name="head.calibration")
        fitted = self._finished(centres, found.weights, found.answers, calibration, trial)
        return fitted._replace(
            steps=found.steps,
            error=found.error,
            passes=products.passes,
            exchanged_bytes=products.exchanged_bytes,
        )

    def _finished(
        self, centres: Tensor, weights: Tensor, answers: Tensor, calibration: Calibration, trial: PenaltyTrial | None
    ) -> Fitted:
        """Return the calibrated fit from weights, (M, C), and this rank's raw outputs, (B, C)."""
        rows, task = self.rows, self.measured
        logits, own = calibration.apply(answers), rows.weights[rows.own].double()
        losses = task.losses(logits.double(), rows.labels[rows.own]) * own if len(own) else own
        sums = self.world.allreduce_sum(torch.stack([losses.sum(), own.sum()]).double(), name="head.loss")
        return Fitted(
            centres,
            (weights.double() * calibration.scale).t().float().contiguous(),
            calibration.bias.float(),
            logits.float(),
            float(sums[0] / sums[1]),
            trial,
        )


def solver_bytes(rows: int, columns: int, *, leads: bool) -> int:
    """Return the memory of the solver in bytes, with all rows as centres."""
    # On rank 0 sixteen float64 vectors, as measured; on others three float32 vectors for products, four for the head.
    return rows * columns * (128 if leads else 28)


def centres_bytes(centres: int, columns: int, *, rows: int, leads: bool) -> int:
    """Return the memory of the solver in bytes for `centres` centres, with the outputs for this rank's `rows`."""
    # For each pair of centres the float32 normal matrix, and on rank 0 its float64 factor. For each number of a vector
    # the vectors above, and two float64 sums of the product: this rank's, in transfer, and total. For each output its
    # target as an integer and in float64, then in float32.
    return 12 * centres**2 + columns * ((112 if leads else 60) * centres + 16 * rows)
