"""Kernel ridge regression over all ranks: features stay where they are, compact points of them go to all.

    fit = fit_kernel(rows, classes=10, world=world, memory_bytes=2**30)
    take(layer, fit)

With points z of the N rows of all ranks, K[i, j] = exp(-|z_i - z_j|^2) and Y[i] the row's class as a one less 1 / C,

    (K + penalty) A = Y

has one solution, that of scikit-learn's KernelRidge; it depends on no learning rate and no order. The sums of a row
become logits by the factor at which the cross-entropy of rows that were not fitted is least. Penalty and factor, and
whether mirror images help, are chosen as `kernel_choice` says; then everything is fitted, held-out rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.resources import give_back
from hvfreeze.comm.world import World
from hvfreeze.errors import UsageError
from hvfreeze.heads.centres import (
    MOST_FACTORED,
    SAMPLED,
    CentreProducts,
    inverse_by_factor,
    inverse_by_landmarks,
    solve_centres,
    tolerance_of,
)
from hvfreeze.heads.gram import MOST_STEPS, ROUNDED_FROM, Gram, Solved, gaussian
from hvfreeze.heads.kernel_choice import (
    Choice,
    Tried,
    choose,
    choose_closely,
    choose_directly,
    columns_at_once,
    fitted_directly,
    solve_ridge,
    targets,
)
from hvfreeze.heads.landmarks import Factor
from hvfreeze.heads.moments import check_choice
from hvfreeze.heads.points import MOST_DIRECTIONS, AllRows, Marks, OwnPoints, everyones, marks_of, points_of
from hvfreeze.heads.rows import WholeRows
from hvfreeze.heads.solution import MirrorTrial, PenaltyTrial, Solution


class KernelHead(nn.Module):
    """Features, (B, D), to logits, (B, C): over all centres z, exp(-|P x + p - z|^2) times its weight for the class.

    `projection` P is (K, D), K = min(D, `MOST_DIRECTIONS`), with standardisation and bandwidth folded in; `shift` p is
    (K,), `centres` (N, K), training rows of all ranks, all or some, and `weight` (C, N); all float32.
    """

    projection: Tensor
    shift: Tensor
    centres: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        """Take D and C; until it is solved, there are no centres and all logits are 0."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        width = min(in_features, MOST_DIRECTIONS)
        self.register_buffer("projection", torch.zeros(width, in_features))
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("centres", torch.zeros(0, width))
        self.weight = nn.Parameter(torch.zeros(out_features, 0))

    def hold(self, rows: int) -> None:
        """Make room for `rows` centres, to be filled."""
        self.centres = self.centres.new_zeros(rows, self.centres.shape[1])
        self.weight.data = self.weight.new_zeros(self.out_features, rows)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, float32."""
        # Distances are small differences of large products: bfloat16 would leave nothing of them.
        with torch.autocast("cpu", enabled=False):
            points = functional.linear(features.float(), self.projection, self.shift)
            return functional.linear(gaussian(points, self.centres), self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        centres = state_dict.get(f"{prefix}centres")
        if isinstance(centres, Tensor) and len(centres) != len(self.centres):
            self.hold(len(centres))
        super()._load_from_state_dict(state_dict, prefix, *rest)


PENALTIES = (1.0, 0.3, 0.1, 0.03)
TOLERANCE, TOLERANCE_OF_MANY = 0.01, 0.05
"""For the residual, as a part of the right sides, and of `ROUNDED_FROM` rows or more, whose products are dear: with
20 000 and 50 000 rows 0.01 gave the same accuracy in half as many steps again."""
MOST_LEFT_OUT = 1_500
"""Rows of which each is left out in turn: all of them choose then, which takes under a second on one core."""
MOST_FACTORED_ROWS, FEW_CLASSES, ALL_FACTORED = 1_600, 40, 6_000
"""Rows that are fitted by a factorisation, on rank 0; of more, conjugate gradients on all ranks take less time. Their
vectors are as many as classes: with more of these than the second for each rank, as many times more rows are factored,
but never more than the third, which take 0.8 GB: it depends on no free memory, so that runs repeat."""
MOST_COMPARED = 5_000
"""Rows on which the penalty is chosen, held-out ones among them: more rows change the choice little."""
ALL_COMPARED = 50_000
"""Rows that are all compared with each other; of more, centres are chosen."""
FEWEST_CENTRES = 10_000
"""That are chosen where nobody says how many: with fewer of very many rows, accuracy is lost faster than time."""


def is_factored(rows: int, *, classes: int, size: int) -> bool:
    """Tell whether so many rows are fitted by a factorisation, on one of `size` ranks."""
    return rows <= min(ALL_FACTORED, MOST_FACTORED_ROWS * max(1.0, classes / (FEW_CLASSES * size)))


def centres_for(rows: int, asked: int | None) -> int:
    """Return how many of so many rows are centres: `asked`, or as many as cost what comparing `ALL_COMPARED` rows does.

    It depends on no clock and no memory, so that runs repeat.
    """
    if asked is None:
        # Of all pairs of rows only half are computed.
        asked = rows if rows <= ALL_COMPARED else max(FEWEST_CENTRES, ALL_COMPARED**2 // (2 * rows))
    return min(rows, asked)


@dataclass(frozen=True)
class KernelFit(Solution):
    """A solved head, equal on all ranks bit for bit but for `answers`, `labels` and `used`.

    See `KernelHead` for what is not described here.
    """

    answers: Tensor
    """The logits of this rank's own rows that were fitted, in their order, (B, C) float32."""
    labels: Tensor
    """Of these rows, (B,) int64."""
    used: Tensor
    """(rows,) bool, which of this rank's rows, in their order, were fitted."""
    projection: Tensor
    shift: Tensor
    centres: Tensor
    weight: Tensor


FACTOR_BYTES = 12
"""For each pair of centres, what rank 0 preconditions the solver by; the others hold a third of it."""
LEADING_BYTES, FOLLOWING_BYTES = 64, 12
"""For each number of a vector: on rank 0 eight in float64, with those that the solver adds them up in; elsewhere three
in float32, as they come, as they are multiplied, and their product."""
LEADING_WHOLE_BYTES, FOLLOWING_WHOLE_BYTES = 56, 16
"""For each number of a solution whose vectors are not all solved at a time: on rank 0 right sides, solutions and what
is left of them in float64, and their product as it travels; elsewhere that, or the head as it comes."""
CENTRE_BYTES = 48
"""For each number of a vector on the centres, which are all solved at a time: the product's two sums in float64, of
this rank, as they travel and of all."""


class Chosen(NamedTuple):
    """What is known of a head before it is fitted to all rows."""

    mine: OwnPoints
    """This rank's rows."""
    marks: Marks
    """Of all ranks' rows."""
    choice: Choice
    mirror: MirrorTrial | None
    """Where mirror images were compared."""
    taken: Tensor
    """(N,) bool, the rows of all ranks that are to be fitted: without mirror images where these do not help."""
    spent: Spent

    @property
    def trial(self) -> PenaltyTrial:
        """Of the chosen penalty; only where there were several."""
        return next(trial for trial in self.choice.trials if trial.penalty == self.choice.penalty)


def choose_head(
    rows: WholeRows,
    *,
    classes: int,
    world: World,
    memory_bytes: int,
    penalties: Sequence[float] = PENALTIES,
    directions: int = MOST_DIRECTIONS,
    trained: bool = False,
    compare_mirrored: bool = False,
    read: Callable[[int], bool] = lambda rows: False,
    watch: Callable[[str], bool] = lambda note: False,
) -> Chosen | None:
    """Return what rows say of a head that was not fitted to them. Collective.

    None where some rank wants to stop before. Rows are compared in so many of the features' leading `directions`; the
    other arguments, and the errors, are `fit_kernel`'s.
    """
    values = list(penalties)
    if not values or min(values) <= 0 or len(set(values)) < len(values):
        raise UsageError(f"penalties ({values}) must be above 0 and different, at least one")
    mine = points_of(rows, directions=directions, world=world, stop=read)
    if mine is None:
        return None
    # Rows are read no more, and what they take is the likenesses' to have.
    rows.forget()
    marks = marks_of(mine, world=world)
    check_choice(int(marks.held_out.sum()), len(values))
    few = len(marks.labels) <= MOST_LEFT_OUT or len(values) == 1
    part = everyones(mine.points, marks, marks.part(MOST_LEFT_OUT if few else MOST_COMPARED), world=world)
    beside = beside_vectors(
        memory_bytes, rows=len(marks.labels), columns=classes * len(values), classes=classes, world=world
    )
    choosing = partial(
        chosen,
        classes=classes,
        penalties=values,
        whole=len(part.labels) == len(marks.labels),
        choosing=part.held_out if trained and part.held_out.any() else torch.ones_like(part.held_out),
        closely=few,
        open_gram=partial(Gram, world=world, memory_bytes=beside, watch=watch),
        world=world,
    )
    found = choosing(part)
    if found is None:
        return None
    everything = torch.ones_like(marks.mirrored)
    if not (compare_mirrored and can_do_without(part)):
        return Chosen(mine, marks, found.choice, None, everything, found.spent)
    plain = ~part.mirrored
    without = choosing(part.only(plain), choosing=choosing.keywords["choosing"][plain])
    if without is None:
        return None
    mirror, spent = compared(found.choice, without.choice), found.spent + without.spent
    if mirror.taken:
        return Chosen(mine, marks, found.choice, mirror, everything, spent)
    return Chosen(mine, marks, without.choice, mirror, ~marks.mirrored, spent)


def fit_kernel(
    rows: WholeRows,
    *,
    classes: int,
    world: World,
    memory_bytes: int,
    penalties: Sequence[float] = PENALTIES,
    tolerance: float | None = None,
    most_steps: int = MOST_STEPS,
    centres: int | None = None,
    trained: bool = False,
    compare_mirrored: bool = False,
    read: Callable[[int], bool] = lambda rows: False,
    watch: Callable[[str], bool] = lambda note: False,
) -> KernelFit | None:
    """Return the head that solves kernel ridge regression on the rows of all ranks, equal on all of them. Collective.

    None where some rank wants to stop before.

    Args:
        rows: this rank's rows; there may be none.
        classes: C, at least 2.
        world: the ranks.
        memory_bytes: for the solver's vectors, and for as many of this rank's likenesses as fit beside them; the others
            are computed anew for each product.
        penalties: above 0; with one, nothing is chosen.
        tolerance: for the residual, as a part of the right sides; None is `TOLERANCE`, or that of many rows. With
            centres `centres.tolerance_of` tells it.
        most_steps: of the solver; `KernelFit.converged` tells whether they sufficed.
        centres: of the rows, that all rows are compared with; None chooses, see `centres_for`.
        trained: whether the network was trained on the rows that are not held out, whose features know their labels:
            then only held-out rows choose, also of few.
        compare_mirrored: whether mirror images are left out where the head is better without them.
        read: called with how many of this rank's rows have their features, as they come; true on some rank ends it all.
        watch: called with how far the solution is, often; true on some rank ends the search.

    Raises:
        UsageError: several penalties and no held-out rows, penalties that are not above 0, or no rows.
        NumericsError: a feature is NaN or infinite.
    """
    ready = choose_head(
        rows,
        classes=classes,
        world=world,
        memory_bytes=memory_bytes,
        penalties=penalties,
        trained=trained,
        compare_mirrored=compare_mirrored,
        read=read,
        watch=watch,
    )
    if ready is None:
        return None
    mine, marks, choice, mirror, taken, spent = ready
    # Where mirror images are left out, this rank's own rows that are fitted.
    fitted, own = mine.used.clone(), taken[marks.own]
    fitted[mine.used] = own
    used = marks.only(taken)
    share = Share(mine.points[own] if not own.all() else mine.points, used, classes, choice)
    count, columns = centres_for(len(used.labels), centres), classes * (1 + share.judged)
    if tolerance is None:
        tolerance = TOLERANCE if count < ROUNDED_FROM else TOLERANCE_OF_MANY
    # What features have taken lies in pieces between what is in use, which likenesses do not fill.
    give_back()
    if count < len(used.labels):
        beside = beside_centres(memory_bytes, centres=count, rows=len(share.points), columns=columns, world=world)
        end = compare_some(count, share, Ends(tolerance, most_steps, beside, watch), world=world)
    else:
        beside = beside_vectors(memory_bytes, rows=count, columns=columns, classes=classes, world=world)
        end = compare_all(share, Ends(tolerance, most_steps, beside, watch), world=world)
    if end is None:
        return None
    solution = replace(
        end.solution,
        passes=mine.passes + spent.passes + end.spent.passes,
        exchanged_bytes=spent.exchanged_bytes + end.spent.exchanged_bytes,
        mirror=mirror,
        left_out=mine.left_out,
    )
    return KernelFit(
        **vars(solution),
        answers=end.answers,
        labels=used.labels[used.own],
        used=fitted,
        projection=mine.matrix,
        shift=mine.shift,
        centres=end.centres,
        weight=end.weight,
    )


def beside_vectors(memory_bytes: int, *, rows: int, columns: int, classes: int, world: World) -> int:
    """Return what the vectors of a solution for `columns` right sides of so many rows leave of the memory.

    The `classes` of one penalty are kept together, also where they are solved a few at a time.
    """
    leads, at_once = world.rank == 0, columns_at_once(rows)
    each, whole = (LEADING_BYTES, LEADING_WHOLE_BYTES) if leads else (FOLLOWING_BYTES, FOLLOWING_WHOLE_BYTES)
    kept = classes if classes > at_once else 0
    return max(0, memory_bytes - rows * (each * min(columns, at_once) + whole * kept))


def beside_centres(memory_bytes: int, *, centres: int, rows: int, columns: int, world: World) -> int:
    """Return what a solution for so many centres leaves of the memory, with the answers to this rank's `rows`."""
    each = CENTRE_BYTES + (LEADING_BYTES if world.rank == 0 else FOLLOWING_BYTES)
    # Targets as whole numbers and in float64, then as answers in float32.
    return max(0, memory_bytes - columns * (each * centres + 16 * rows))


class Spent(NamedTuple):
    """Products that were made, and bytes that each rank gave to allreduces for them."""

    passes: int = 0
    exchanged_bytes: int = 0

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(self.passes + other.passes, self.exchanged_bytes + other.exchanged_bytes)


class Found(NamedTuple):
    """A choice, and what it took."""

    choice: Choice
    spent: Spent


def chosen(
    part: AllRows,
    *,
    classes: int,
    penalties: Sequence[float],
    whole: bool,
    choosing: Tensor,
    closely: bool,
    open_gram: Callable[..., Gram],
    world: World,
) -> Found | None:
    """Return the choice for a head that is fitted to `part`, None where some rank wants to stop. Collective.

    If `closely`, each sample is left out in turn, and the rows `choosing` choose; else held-out rows do.
    """
    choosing_by: Any = {"classes": classes, "penalties": penalties}
    if closely:
        mine = choose_closely(part, choosing=choosing, **choosing_by) if world.rank == 0 else None
        found = world.broadcast_object(mine, name="head.choice")
        assert found is not None, "rank 0's"
        return Found(found, Spent())
    gram = open_gram(part.points)
    directly = is_factored(len(part.labels), classes=classes, size=world.size)
    how = choose_directly if directly else partial(choose, gram)
    choice = world.broadcast_object(gram.lead(partial(how, part, whole=whole, **choosing_by)), name="head.choice")
    return None if choice is None else Found(choice, Spent(gram.passes, gram.exchanged_bytes))


def can_do_without(rows: AllRows) -> bool:
    """Tell whether there are mirror images, and every sample is there as it is too."""
    plain = rows.samples[~rows.mirrored]
    return bool(rows.mirrored.any()) and len(plain.unique()) == len(rows.samples.unique())


def compared(with_them: Choice, without: Choice) -> MirrorTrial:
    """Return what the two choices say of mirror images."""
    ours, theirs = with_them.plain, without.plain
    assert ours is not None and theirs is not None
    return MirrorTrial(ours.loss, theirs.loss, ours.accuracy, theirs.accuracy, ours.rows)


class Share(NamedTuple):
    """What a head is fitted to, and how."""

    points: Tensor
    """(B, K), of this rank's own rows."""
    marks: Marks
    """Of all ranks' rows."""
    classes: int
    choice: Choice

    @property
    def judged(self) -> bool:
        """Whether a part of the rows has chosen: held-out rows then judge a fit to all others beside the last one."""
        trials = self.choice.trials
        return bool(trials) and not all(trial.whole for trial in trials)


class Ends(NamedTuple):
    """When the solver ends, the memory that it may take, and who watches it; see `fit_kernel`."""

    tolerance: float
    most_steps: int
    memory_bytes: int
    watch: Callable[[str], bool]


class End(NamedTuple):
    """A head that was found."""

    solution: Solution
    centres: Tensor
    """(N, K)."""
    weight: Tensor
    """(C, N) float32."""
    answers: Tensor
    """(B, C) float32, the logits of this rank's own rows."""
    spent: Spent


def solution_of(
    share: Share, tried: Tried | None, *, loss: float, steps: int, error: float, tolerance: float, centres: int
) -> Solution:
    """Return the numbers of a solution; `tried` is what held-out rows say of a fit to all others."""
    penalty, _, trials, _ = share.choice
    if tried is not None:
        trials = tuple(tried.trial if trial.penalty == penalty else trial for trial in trials)
    rows = len(share.marks.labels)
    return Solution(penalty, trials, loss, rows, steps, 0, error, error <= tolerance, 0, compared_with=centres)


def compare_all(share: Share, ends: Ends, *, world: World) -> End | None:
    """Return the head for which all rows are compared with each other, None where some rank stops it. Collective."""
    rows = everyones(share.points, share.marks, torch.ones_like(share.marks.held_out), world=world)
    gram = Gram(rows.points, world=world, memory_bytes=ends.memory_bytes, watch=ends.watch)
    result = world.broadcast_object(gram.lead(partial(finish, gram, rows, share, ends)), name="head.fit")
    if result is None:
        return None
    solution, weight, answers = result
    return End(solution, rows.points, weight, answers[rows.own], Spent(gram.passes, gram.exchanged_bytes))


def compare_some(count: int, share: Share, ends: Ends, *, world: World) -> End | None:
    """Return the head for which all rows are compared with `count` of them. Collective.

    None where some rank stops it.
    """
    points, marks, classes, (penalty, scale, *_) = share
    kept = marks.spread(count)
    centres = everyones(points, marks, kept, world=world).points
    places = torch.full((len(points),), -1)
    places[kept[marks.own]] = marks.moved(kept)
    held_out, rows, factored = marks.held_out[marks.own], len(marks.labels), count <= MOST_FACTORED
    products = CentreProducts(
        points,
        centres,
        places=places,
        left_out=held_out,
        columns=classes,
        rounded=rows >= ROUNDED_FROM,
        world=world,
        memory_bytes=max(0, ends.memory_bytes - (FACTOR_BYTES * count**2 if factored else 0)),
        watch=ends.watch,
    )
    if factored:
        sampled = min(rows, SAMPLED * count)
        normal = products.normal_matrix(points[marks.spread(sampled)[marks.own]]).mul_(rows / sampled)
    right = products.right_sides(marks.labels[marks.own], classes, copies=1 + share.judged)

    def solving() -> Solved:
        inverse = (
            inverse_by_factor(centres, normal, penalty)
            if factored
            else inverse_by_landmarks(centres, penalty, rows=rows)
        )
        return solve_centres(
            products,
            right,
            inverse=inverse,
            inverse_is_close=factored,
            penalty=penalty,
            most_steps=ends.most_steps,
        )

    solved = world.broadcast_object(products.lead(solving), name="head.fit")
    if solved is None:
        return None
    answers, tried = products.answers(solved.vectors), None
    if share.judged:
        judges, judged = marks.only(marks.held_out), answers[held_out, classes:].contiguous()
        whole = torch.zeros(len(judges.labels), classes)
        whole[judges.own] = judged
        whole = world.allreduce_sum(whole, name="head.judged")
        everyone = torch.ones_like(judges.held_out)
        tried = Tried.of(penalty, whole.double(), judges, choosing=everyone, steps=solved.steps, whole=True)
        scale = tried.scale
    answers = scale * answers[:, :classes]
    mine = functional.cross_entropy(answers.double(), marks.labels[marks.own], reduction="sum")
    loss = float(world.allreduce_sum(mine.reshape(1), name="head.loss")) / rows
    solution = solution_of(
        share, tried, loss=loss, steps=solved.steps, error=solved.error, tolerance=tolerance_of(factored), centres=count
    )
    weight = (scale * solved.vectors[:, :classes]).t().float().contiguous()
    return End(solution, centres, weight, answers, Spent(products.passes, products.exchanged_bytes))


class Fit(NamedTuple):
    """A fit to all rows, and what it cost."""

    vectors: Tensor
    """A, (N, C) float64."""
    sums: Tensor
    """K A, (N, C) float64."""
    judged: Tensor | None
    """(N, C) float64, the sums of held-out rows of a fit to all others; the other rows' mean nothing."""
    steps: int
    error: float


def finish(gram: Gram, rows: AllRows, share: Share, ends: Ends) -> tuple[Solution, Tensor, Tensor]:
    """Return the solution on all rows, its weight, (C, N), and its answers to all rows, (N, C), both float32.

    To be called in `Gram.lead`.
    """
    penalty, scale, count = share.choice.penalty, share.choice.scale, len(rows.labels)
    # With few classes the steps take as long, and some rank can stop them.
    many = share.classes > FEW_CLASSES * gram.ranks
    directly = many and is_factored(count, classes=share.classes, size=gram.ranks)
    fit, tried = (factor_all(rows, share) if directly else step_through_all(gram, rows, share, ends)), None
    if fit.judged is not None:
        tried = Tried.of(penalty, fit.judged, rows, choosing=rows.held_out, steps=fit.steps, whole=True)
        scale = tried.scale
    loss = float(functional.cross_entropy(scale * fit.sums, rows.labels))
    tolerance, steps, error = ends.tolerance, fit.steps, fit.error
    solution = solution_of(share, tried, loss=loss, steps=steps, error=error, tolerance=tolerance, centres=count)
    return solution, (scale * fit.vectors).t().float().contiguous(), (scale * fit.sums).float()


def factor_all(rows: AllRows, share: Share) -> Fit:
    """Return the fit by a factorisation."""
    right, penalty = targets(rows.labels, share.classes), share.choice.penalty
    held_out = rows.held_out if share.judged else None
    vectors, judged = fitted_directly(rows.points, right, penalty, held_out=held_out)
    return Fit(vectors, right - penalty * vectors, judged, steps=0, error=0.0)


def step_through_all(gram: Gram, rows: AllRows, share: Share, ends: Ends) -> Fit:
    """Return the fit by conjugate gradients, to be called in `Gram.lead`.

    The fit that is judged is in the same products: twice as many vectors take little longer.
    """
    classes, penalty = share.classes, share.choice.penalty
    right, everything = targets(rows.labels, classes), torch.ones(len(rows.labels), 1, dtype=torch.bool)
    together = share.judged and 2 * classes <= columns_at_once(len(right))
    known, others = Factor(rows.points), ~rows.held_out[:, None]
    # What finding these took, before the likenesses take theirs.
    give_back()

    def fitted_to(*masks: Tensor) -> Solved:
        columns = classes * len(masks)
        return solve_ridge(
            gram,
            right.repeat(1, len(masks)),
            torch.full((columns,), penalty, dtype=torch.float64),
            fitted=torch.cat([mask.expand(-1, classes) for mask in masks], 1),
            known=known,
            tolerance=ends.tolerance,
            most_steps=ends.most_steps,
        )

    solved, answers = fitted_to(everything, others) if together else fitted_to(everything), None
    if share.judged:
        judged = solved.vectors[:, classes:] if together else fitted_to(others).vectors
        answers = gram.times(judged).double()
    vectors, left = solved.vectors[:, :classes], solved.left[:, :classes]
    # With the residual the answers need no other product.
    return Fit(vectors, right - left - penalty * vectors, answers, solved.steps, solved.error)
