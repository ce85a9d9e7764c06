"""Studies of one question each: the parts of auto, the whole command's time, chosen features, the weights' recipes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis import auto_parts, backbone, peers
from analysis.chosen_features import SHARES, Views, chosen, solved
from analysis.clock import RANKS, commands
from analysis.parts import clock_tables, selection
from analysis.parts.selection import fitted, gradient, used
from analysis.sweeps.kept import RESULTS
from analysis.sweeps.presets import REDUCED, SMOKE
from analysis.sweeps.results import Results
from hvfreeze.data.data_sets import DataSplits, ImageSet, open_data
from hvfreeze.data.images import ArraySource
from hvfreeze.model.weights import read_weights
from tests.single.analysis.runs_material import carried_out

CLASSES, TOLD, IDLE = 10, 12, 40


def test_the_whole_and_what_is_solved_alone_are_the_runs_that_peers_make_too() -> None:
    theirs = {run.name: run for run in peers.then(REDUCED, Results(Path(), []), peers.Ground())}
    shared = [run for run in auto_parts.runs(REDUCED) if run.name in theirs]
    assert {run.label for run in shared} == {auto_parts.WHOLE, auto_parts.SOLVED}
    assert [run.identity() for run in shared] == [theirs[run.name].identity() for run in shared]


def test_every_part_is_left_out_once_and_differs_in_that_alone() -> None:
    by_label = {run.label: run.flags for run in auto_parts.runs(REDUCED)}
    assert by_label.keys() == {auto_parts.WHOLE, *auto_parts.PARTS} == {auto_parts.WHOLE, *auto_parts.WORDS}
    for label, changes in auto_parts.PARTS.items():
        assert by_label[label] == {**by_label[auto_parts.WHOLE], **changes}


@pytest.mark.usefixtures("no_training", "no_files")
def test_a_part_that_gives_points_helps_and_one_that_takes_them_is_negative(tmp_path: Path) -> None:
    results = carried_out(auto_parts.EXPERIMENT, replace(SMOKE, seeds=(0, 1, 2)), tmp_path)
    assert set(results.labels) == {auto_parts.WHOLE, "without-votes"}
    for points, wanted in ((0.02, "it helps"), (-0.02, "it harms (negative)")):
        rows = [
            {**row, "test_accuracy": 0.5 + 0.001 * row["seed"] + points * (row["label"] == auto_parts.WHOLE)}
            for row in results.rows
        ]
        (table,) = auto_parts.tables(replace(results, rows=rows))
        assert table.rows[1][3] == wanted
    assert "without it: votes while tuning" in auto_parts.answers(results)[0].text


def command(way: str, ranks: int, whole: float, train: float, *, epochs: int = 1, made: int = 1) -> dict[str, str]:
    values = {"experiment": "peers64", "samples": 1000, "way": way, "ranks": ranks}
    values |= {"epochs": epochs, "epochs_made": made}
    seconds = {"whole_seconds": whole, "train_seconds": train, "evaluate_seconds": 4.0}
    return {name: str(value) for name, value in {**values, **seconds}.items()}


def test_whole_commands_are_compared_and_epochs_that_were_not_made_are_added() -> None:
    rows = [command("auto", 2, 20.0, 5.0), command("auto-one-view", 2, 15.0, 2.0)]
    rows += [command("full", 2, 60.0, 50.0, epochs=8, made=8), command("full", 1, 20.0, 10.0, epochs=8, made=1)]
    assert [clock_tables.times(rows[-1:], what).mean for what in ("whole", "train")] == [90.0, 80.0]
    (said,) = clock_tables.verdicts(rows)
    assert said.startswith("- 1000 images at 64 pixels: 8 epochs of full fine-tuning 60.0 s")
    assert "3.00x as fast (10.00x where training alone counts)" in said
    assert said.endswith("evaluating takes 4.00 s on average")
    assert clock_tables.verdicts(rows[1:]) == []
    row = "| 1000 at 64 pixels | full fine-tuning | 90.0 s (80.0 s) | 60.0 s (50.0 s) |"
    assert row in clock_tables.table(rows)


def test_the_shortest_full_fine_tuning_that_is_good_enough_is_compared_on_every_number_of_ranks() -> None:
    planned = list(commands())
    assert len({(each.experiment, each.cell, each.ranks) for each in planned}) == len(planned) == 4 * 3 * len(RANKS)
    epochs = {(each.experiment, each.cell.samples): each.cell.epochs for each in planned if each.cell.peer == "full"}
    assert epochs["peers64", 1_000] < 16
    assert {each.epochs for each in planned if each.ranks != 2} == {1}


def views(rows: int = 400) -> Views:
    """Return features of which the first TOLD lie where their class is, and the others say nothing."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(CLASSES, TOLD, generator=generator)
    labels = torch.arange(2 * rows) % CLASSES
    told = centres[labels] + torch.randn(2 * rows, TOLD, generator=generator)
    features = torch.cat([told, torch.randn(2 * rows, IDLE, generator=generator)], 1)
    held_out = torch.arange(rows) % 7 == 0
    return Views(features[:rows], labels[:rows], held_out, features[rows:], labels[rows:])


def test_a_group_lasso_finds_a_minimum_in_which_the_features_that_tell_classes_apart_are_used() -> None:
    """In a minimum the loss falls along a used feature's weights as much as the penalty rises, along none more."""
    known, strength = views(), 0.1
    features = (known.rows - known.rows.mean(0)) / known.rows.std(0, correction=0)
    truth = torch.nn.functional.one_hot(known.labels, CLASSES).float()
    bias, nothing = truth.mean(0).log(), torch.zeros(TOLD + IDLE, CLASSES)
    limit = strength * float(gradient(features, truth, nothing, bias).norm(dim=1).max())
    found = fitted(features, known.labels, classes=CLASSES, strength=strength, steps=800)
    falls, norms = -gradient(features, truth, found, bias), found.norm(dim=1, keepdim=True)
    is_used = norms[:, 0] > 0
    assert 0 < int(is_used.sum()) <= TOLD + 3
    assert torch.allclose(falls[is_used], (limit * found / norms)[is_used], atol=0.02 * limit)
    assert float(falls[~is_used].norm(dim=1).max()) <= 1.001 * limit
    usual = used(features, known.labels, classes=CLASSES)
    assert set(usual.argsort(descending=True)[:TOLD].tolist()) == set(range(TOLD))
    assert not used(features, known.labels, classes=CLASSES, strength=1.01).any()


def test_shares_of_the_features_are_chosen_by_use_and_at_random() -> None:
    found = dict(chosen(views(), seed=0))
    ways = [f"{share:.0%} {how}" for share in SHARES for how in ("by group lasso", "at random")]
    assert list(found) == ["all", *ways]
    widths = [round(share * (TOLD + IDLE)) for share in SHARES for _ in range(2)]
    assert [found[way].test.shape[1] for way in ways] == widths
    # A tenth of them are fewer than those that tell something, a half are more.
    kept = {float(value) for value in found["50% by group lasso"].rows[0]}
    assert kept >= {float(value) for value in views().rows[0, :TOLD]}


@pytest.mark.parametrize("head", ["compared", "linear"])
def test_a_head_on_useful_features_is_right_and_one_on_idle_features_guesses(head: str) -> None:
    known = views()
    good, penalty = solved(known.only(torch.arange(TOLD)), head)
    bad, _ = solved(known.only(torch.arange(TOLD, TOLD + IDLE)), head)
    given, taken = solved(known, head, penalty=penalty)
    assert good > 0.9 > 0.3 > bad
    assert taken == penalty and given > 0.8
    assert known.beside(known).test.shape == (400, 2 * (TOLD + IDLE))


def test_both_questions_of_chosen_features_are_answered_for_both_heads() -> None:
    rows = [
        {"seed": str(seed), "features": name, "head": head, "width": "9", "accuracy": str(accuracy + seed / 1000)}
        for seed in range(3)
        for name, accuracy in (("all", 0.7), ("50% by group lasso", 0.6), ("tuned", 0.72), ("tuned and frozen", 0.73))
        for head in ("compared", "linear")
    ]
    said, table = selection.answers(rows), selection.table(rows)
    assert said.count("50% by group lasso -10.0 points") == said.count("beside those of after +1.0 points") == 2
    assert table.count("worse (negative)") == 2 and table.count("better") == 4


@pytest.fixture
def brightness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of four classes that differ in their brightness, in place of CIFAR-100."""

    def split(count: int) -> ImageSet:
        labels = torch.arange(count) % 4
        noise = np.random.default_rng(count).integers(0, 30, (count, 3, 32, 32))
        pixels = (60 * labels.numpy()[:, None, None, None] + noise).astype(np.uint8)
        digits = open_data("digits").train
        return dataclasses.replace(
            digits, name="cifar100", classes=tuple("abcd"), labels=labels, source=ArraySource(pixels=pixels, side=None)
        )

    monkeypatch.setattr(backbone, "prepare_data", lambda name, directory: None)
    splits = DataSplits(train=split(96), validation=None, test=split(24))
    monkeypatch.setattr(backbone, "open_data", lambda name, directory: splits)
    monkeypatch.setattr(backbone, "BATCH", 16)


def made(folder: Path, name: str, recipe: str, *more: str) -> Path:
    out = folder / name
    small = ["--model", "shufflenet_v2_x0_5", "--threads", "1"]
    assert backbone.main([recipe, "--out", str(out), *small, *more]) == 0
    return out


def test_both_recipes_train_and_say_the_digest_of_what_they_wrote(
    brightness: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made(tmp_path, "a.pt", "32px", "--epochs", "3")
    said = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said.splitlines() if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert f"SHA-256 {backbone.hashlib.sha256(first.read_bytes()).hexdigest()}" in said
    state = read_weights(str(first))
    assert {tensor.dtype for name, tensor in state.items() if "num_batches" not in name} == {torch.float16}
    assert backbone.RECIPES["32px"].sha256 in said
    assert made(tmp_path, "b.pt", "32px", "--epochs", "3").read_bytes() == first.read_bytes()
    second = made(tmp_path, "c.pt", "64px", "--epochs", "1", "--start", str(first))
    assert second.read_bytes() != first.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "c.pt"]


def test_the_second_recipe_needs_the_first_ones_file(
    brightness: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backbone.main(["64px", "--out", str(tmp_path / "a.pt")]) == 2
    assert "name it with --start" in capsys.readouterr().err


def test_the_digests_are_those_that_the_kept_results_name() -> None:
    known = {recipe.file: recipe.sha256 for recipe in backbone.RECIPES.values()}
    named = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*/preset.json"))]
    assert len(named) == 17
    # Another family's, which its experiment trains itself.
    named = [told for told in named if told["flags"]["weights"] != "model.pt"]
    assert len(named) == 16
    assert {told["flags"]["weights"] for told in named} == set(known)
    for told in named:
        assert told["weights_sha256"] == known[told["flags"]["weights"]]
