"""Do weighted votes of the ranks decide better than one signal, when their data differ? (Left open by the study.)

    python -m analysis.votes --log              every rank's evidence at every vote of runs in which nothing freezes
    python -m analysis.votes --replay           all rules of voting on that evidence, and the page
    python -m analysis.votes --train            runs with the rules that differ from the default
    python -m analysis.votes --preset reduced --data-dir DIR --weights FILE

The first three need no data. What is there is not made again. Of the last, the runs of the whole program on four ranks:
Default: label skew Dirichlet(0.1), equal shards, percentile criterion, equal weights, quorum one half. Changed one at a
time: skew, weights, quorum, shard sizes; controls: the criterion on averaged gradients, and rank 0 alone. A weighted
median of the ranks' scores is computed afterwards from the scores that every vote wrote down.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from analysis.parts import vote_pages
from analysis.parts.vote_log import BATCH, INTERVAL, LR, SKEWS, STEPS
from analysis.parts.vote_rules import LEFT, LEVEL
from analysis.parts.vote_study import EVIDENCE, RULES, add_missing, read_logs, replay, train_missing
from analysis.sweeps.charts import in_time
from analysis.sweeps.experiment import Answer, Drawing, Experiment, write_up
from analysis.sweeps.kept import RESULTS, publish
from analysis.sweeps.presets import REDUCED, PlannedRun, Preset, Value
from analysis.sweeps.results import FINAL_CUT, Results, open_results
from analysis.sweeps.statistics import (
    Interval,
    is_below,
    mean_interval,
    shown,
    within,
)
from analysis.sweeps.sweep import main
from hvfreeze.freezing.criteria import CRITERIA, Evidence
from hvfreeze.report.figures import NARROW, plot_cuts
from hvfreeze.report.tables import Table, percent, to_csv

QUESTION = "4. Do weighted votes help when the ranks' data differ?"
DEFAULT = "default"
SKEW = "dirichlet:0.1"
RULE: dict[str, Value] = {"freeze": "percentile", "eta_max": 1.0}
UNEVEN = (4, 2, 1, 1)
REFERENCES = {"iid": "iid-full", "dirichlet1": "dirichlet1-full", "sizes": "sizes-full", "sizes-samples": "sizes-full"}
"""Full fine-tuning on the same data, for those whose data are not the default's."""


WHOLE_PROGRAM = "Runs of the whole program on four ranks, 7 votes each, by the percentile criterion:"
REPLAY_CAPTION = (
    "What rules of voting save and what they forgo, as if each had decided on the evidence of the same runs; a line is "
    "a weighting at quorums of a quarter, a half and three quarters; n = {seeds} seeds. Source {commit}, {processor}."
)


def variants(ranks: int) -> dict[str, dict[str, Value]]:
    """Return what is changed against `full`, by label."""
    sizes = ",".join(str(size) for size in UNEVEN[:ranks])
    alone = ",".join(["1", *["0"] * (ranks - 1)])
    changes: dict[str, dict[str, Value]] = {"full": {}, DEFAULT: RULE}
    for label, partition in (("iid", "iid"), ("dirichlet1", "dirichlet:1")):
        changes[f"{label}-full"] = {"partition": partition}
        changes[label] = {**RULE, "partition": partition}
    changes.update({weight: {**RULE, "vote_weight": weight} for weight in ("loss", "coverage", "snr")})
    changes.update({f"quorum{quorum:g}": {**RULE, "quorum": quorum} for quorum in (0.25, 0.75, 1.0)})
    changes["sizes-full"] = {"shard_sizes": sizes}
    changes["sizes"] = {**RULE, "shard_sizes": sizes}
    changes["sizes-samples"] = {**RULE, "shard_sizes": sizes, "vote_weight": "samples"}
    changes["averaged"] = {**RULE, "signal": "averaged"}
    changes["rank0"] = {**RULE, "vote_weight": alone}
    return changes


def runs(preset: Preset) -> list[PlannedRun]:
    """Return all variants; a seed's runs follow each other in time. The batch of all ranks is the preset's."""
    ranks = preset.vote_ranks
    changes = variants(ranks)
    if preset.is_smoke:
        changes = {label: changes[label] for label in ("full", "rank0")}
    batch = max(1, preset.batch_size * preset.ranks // ranks)
    common: dict[str, Value] = {"blocks": preset.fine, "partition": SKEW, "batch_size": batch}
    return preset.runs(
        changes, {**common, "epochs": preset.vote_epochs, "evaluate_every": preset.vote_epochs}, ranks=ranks
    )


def reference(label: str) -> str:
    """Return the label of full fine-tuning on the same data."""
    return REFERENCES.get(label, "full")


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the smallest value at which half of the weight is reached."""
    total, reached = sum(weights), 0.0
    ordered = sorted(zip(values, weights))
    for value, weight in ordered:
        reached += weight
        if reached >= total / 2:
            return value
    return ordered[-1][0]


def median_cut(line: Mapping[str, Any], *, eta_max: float) -> int | None:
    """Return the cut that one criterion on the ranks' weighted median scores would choose; None without scores."""
    num_blocks = len(line["tally"])
    scores: list[float | None] = []
    for block in range(num_blocks):
        known = [(row[block], weight) for row, weight in zip(line["etas"], line["weights"]) if row[block] is not None]
        known = [(score, weight) for score, weight in known if weight > 0]
        scores.append(weighted_median(*zip(*known)) if known else None)
    if all(score is None for score in scores):
        return None
    evidence = Evidence(
        cut=line["cut_before"],
        num_blocks=num_blocks,
        has_parameters=tuple(score is not None for score in scores),
        # Norms whose rate of change is the score.
        previous_norms=(1.0,) * num_blocks,
        norms=tuple(1.0 if score is None else 1.0 + score for score in scores),
        epoch=0.0,
        num_epochs=1,
        warmup_epochs=0.0,
        eta_max=eta_max,
    )
    return CRITERIA[line["criterion"]].propose(evidence)


def agreement(results: Results, label: str) -> tuple[int, int]:
    """Return in how many votes the median would have chosen the vote's cut, and how many votes had scores."""
    cuts = [
        (median_cut(line, eta_max=float(run.settings["eta_max"])), line["cut_after"])
        for run in results.runs_of(label)
        for line in run.decisions
        if line["proposals"]
    ]
    scored = [(median, vote) for median, vote in cuts if median is not None]
    return sum(median == vote for median, vote in scored), len(scored)


def share(results: Results, label: str) -> Interval:
    """Return the share of votes in which ranks proposed different cuts."""
    shares = [row["disagreements"] / row["votes"] for row in results.of(label) if row["votes"]]
    return within(mean_interval(shares), 0, 1)


def voting(results: Results) -> list[str]:
    """Return the labels of runs that voted."""
    return [label for label in results.labels if not label.endswith("full")]


def alike(results: Results) -> list[str]:
    """Return the labels that voted on the default's data, and so differ in nothing but how they voted."""
    return [label for label in voting(results) if label not in REFERENCES]


def distinct(results: Results, labels: Sequence[str]) -> int:
    """Return how many different trainings the runs of some labels are: equal parameters at the end, one training."""
    return len({row["parameter_digest"] or row["run"] for label in labels for row in results.of(label)})


def answers(results: Results) -> list[Answer]:
    """Return the answer to question 4: what the replay says, else what whole runs do."""
    folder = results.directory
    advice = vote_pages.advice(folder)
    if advice:
        return [Answer(QUESTION, advice, int(vote_pages.usual(folder)["seeds"]), details=vote_pages.said(folder))]
    return whole_runs(results)


def whole_runs(results: Results) -> list[Answer]:
    """Return what the runs of the whole program say."""
    if not results.of(DEFAULT) or not results.of("averaged"):
        return []
    change, (matched, scored) = results.change(DEFAULT, "averaged"), agreement(results, DEFAULT)
    rows = [row for label in alike(results) for row in results.of(label)]
    trainings, counts = distinct(results, alike(results)), sorted({row["votes"] for row in rows})
    votes = f"{counts[0]} votes" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} votes"
    undecided = change.n < 2 or change.low < 0 < change.high or trainings < len(rows)
    text = (
        f"{'Too few votes to say: voting' if undecided else 'Voting'} on local signals changes accuracy by "
        f"{results.change_text(DEFAULT, 'averaged', count=True)} against the criterion on averaged gradients."
    )
    details = (
        (
            f"Under label skew {SKEW} the {len(rows)} runs that differ in how they vote are {trainings} distinct "
            f"trainings, of {votes} each."
        ),
        f"The ranks disagree in {shown(share(results, DEFAULT), percent, count=True)} of the votes.",
        (
            f"Accuracy against rank 0 deciding alone: {results.change_text(DEFAULT, 'rank0')}; against full "
            f"fine-tuning: {results.change_text(DEFAULT)}, at a speed-up of {results.gain_text(DEFAULT)}."
        ),
        f"A weighted median of the scores would have chosen the same cut in {matched} of {scored} votes.",
    )
    return [Answer(QUESTION, text, change.n, negative=is_below(change, 0), undecided=undecided, details=details)]


def tables(results: Results) -> list[Table]:
    """Return a row per variant."""
    rows = []
    for label in results.labels:
        against, votes = reference(label), label in voting(results)
        matched, scored = agreement(results, label) if votes else (0, 0)
        rows.append(
            (
                label,
                results.accuracy_text(label),
                results.change_text(label, against) if votes else "",
                results.time_text(label),
                results.gain_text(label, against) if votes else "",
                results.cut_text(label),
                shown(share(results, label), percent) if votes else "",
                f"{matched} of {scored}" if scored else "",
            )
        )
    columns = ("Variant", "Test accuracy", "Against full", "Training time", "Speed-up", FINAL_CUT)
    whole = Table(
        columns=(*columns, "Votes with disagreement", "Median: same cut"), rows=tuple(rows), title=WHOLE_PROGRAM
    )
    return [*vote_pages.tables(results.directory), whole]


def drawings(results: Results) -> list[Drawing]:
    """Return what replayed rules save and forgo, and of whole runs cuts, and accuracy against time."""
    labels = voting(results)
    if not labels:
        return []
    drawn = [label for label in (DEFAULT, "iid", "averaged", "rank0", "loss") if results.of(label)]
    crowded = " More ranks than cores crowd the machine."
    folder = results.directory
    caption = REPLAY_CAPTION.format(**vote_pages.usual(folder)) if vote_pages.advice(folder) else ""
    return [
        *([Drawing("replay", caption, vote_pages.trade(folder))] if caption else []),
        Drawing(
            "cuts",
            "The cut and the ranks' proposals; n = 1, the first seed.",
            plot_cuts([results.runs_of(label)[0] for label in drawn], width=NARROW),
        ),
        in_time(results, results.labels, counted=labels, more=crowded),
    ]


WORDS = ", ".join(skew.words for skew in SKEWS.values())
GROUND = (
    f"Replayed: {len(SKEWS)} kinds of skew ({WORDS}), {STEPS} steps, a vote every {INTERVAL}; "
    f"batches of {BATCH}, SGD at {LR:g}, cosine; a network of four convolutions that knows the digits "
    "0 to 4 and is fine-tuned on all ten, 8 x 8 pixels. Ranks take turns in one process, which computes what data "
    "parallelism does."
)
HINDSIGHT = (
    f"Hindsight: a cut is too early where its blocks' part of all gains to come is {LEVEL:g} or more of their part of "
    "the work, too late where a deeper one's is less; gains are products of the honest ranks' averages of two steps in "
    f"a row, times the learning rate. Votes with less than {percent(LEFT)} of the run's gain to come are not judged. "
    "Gains are first-order, and blocks that freeze change what others gain; accuracy is what counts."
)
REPLAYED = (
    "A replay sees the evidence of a run in which nothing froze, and no thaw. Its intervals are bootstrapped over "
    "seeds, each the mean over skews; those of accuracies are Student's t. Uniform weights between two quorums are "
    "taken to lie on a line, which is above what they would forgo if there were quorums between."
)
CHOSEN = (
    "The network, its learning rate and pretraining, the level of hindsight (0.3; 0.1 and 0.5 were tried) and the "
    "looser --min-gain (0.3; 0.5 was tried) were chosen while looking at runs of these seeds: shares too early and too "
    "late are exploratory. Many rules are compared, without a correction for that."
)
LIMITS = (
    GROUND,
    HINDSIGHT,
    CHOSEN,
    REPLAYED,
    "fixed is 1,1,1,0: the rank whose data are spoilt or few has no vote, as if one knew.",
    "The weighted median of whole runs is scored vote by vote on the states that the real votes led to.",
    "Runs of equal parameters at the end are one training: how they were weighed made no difference to any vote.",
    "Uneven shards also shorten the epoch: every rank makes as many steps as the smallest shard has batches.",
    "The front of full fine-tuning was measured without label skew and at another number of ranks.",
)
EXPERIMENT = Experiment(
    "votes", "Weighted votes under uneven data", runs, answers, tables, drawings, LIMITS, reference="full", shown=4
)
STAGES = ("log", "replay", "train")


def run(arguments: Sequence[str] | None = None) -> int:
    """Log, replay or train with rules, as asked for; else make the runs of the whole program; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.votes", add_help=False, allow_abbrev=False)
    for name in STAGES:
        parser.add_argument(f"--{name}", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if not any(getattr(options, name) for name in STAGES):
        return main(EXPERIMENT, rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    folder = RESULTS / EXPERIMENT.name
    torch.set_num_threads(1)
    if options.log:
        add_missing(folder / EVIDENCE)
    if options.replay:
        publish(folder / RULES, to_csv(replay(read_logs(folder / EVIDENCE))))
    if options.train:
        train_missing(folder)
    results = open_results(RESULTS, EXPERIMENT.name, EXPERIMENT.reference)
    write_up(EXPERIMENT, REDUCED, results, made=False)
    for answer in answers(results):
        print(answer.text)
    return 0


if __name__ == "__main__":
    sys.exit(run())
