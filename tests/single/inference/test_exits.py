"""A model that was trained with local critics: each of its exits answers, all together, or the first that is sure."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import hvfreeze
from hvfreeze.errors import RefusedError
from hvfreeze.inference.card import read_card
from hvfreeze.inference.exits import Leaving, answering
from hvfreeze.inference.model import Applied
from hvfreeze.model.early_exits import EarlyExits, first_sure, work_until
from tests.program import call
from tests.single.inference.conftest import Finished, train

CONFIDENCE = 0.9


@dataclass(frozen=True)
class WithExits:
    """A run of four layer groups, and the images that it was evaluated on."""

    run: Path
    images: Path
    critics: dict[str, Any]
    accuracy: float

    @property
    def applied(self) -> Applied:
        return hvfreeze.load_model(self.run)

    @property
    def exits(self) -> EarlyExits:
        exits = self.applied.exits
        assert exits is not None
        return exits


@pytest.fixture(scope="module")
def run(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> WithExits:
    folder = tmp_path_factory.mktemp("exits") / "run"
    flags = "--strategy local-critics --model resnet20 --image-size 16 --epochs 3 --evaluate-every 3 --lr 0.005"
    summary = train(finished.images, folder, flags)
    return WithExits(folder, finished.images / "test", summary["critics"], summary["test_accuracy"])


def evaluated(run: WithExits, *flags: str) -> tuple[float, list[str]]:
    """The accuracy that the command tells, 0-1, and the lines behind the classes."""
    outcome = call("evaluate", str(run.run), *flags)
    assert outcome.returncode == 0, str(outcome)
    right = re.search(r"\((\d+) of 21\)", outcome.stdout)
    assert right is not None, str(outcome)
    lines = outcome.stdout.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("exit ")]
    return int(right[1]) / 21, lines[starts[0] + 1 :] if starts else []


def test_a_model_that_runs_all_of_its_parts_passes_its_critics_over(tmp_path: Path) -> None:
    flags = "--strategy local-critics --model mlp-16x16x16 --parts 2 --train-samples 60 --batch-size 8 --epochs 1"
    trained = call("train", *flags.split(), "--threads", "1", "--quiet", "--run-dir", str(tmp_path))
    assert trained.returncode == 0, str(trained)
    outcome = call("evaluate", str(tmp_path))
    assert outcome.returncode == 0 and "as the run reported" in outcome.stdout, str(outcome)


def test_exits_are_as_right_as_the_run_found_them(run: WithExits) -> None:
    assert evaluated(run) == (run.accuracy, [])
    accuracies = run.critics["exit_accuracy"]
    assert len(set(accuracies)) > 1 and accuracies[3] == run.accuracy, "exits that are all as right prove little"
    other = next(number for number in (1, 2, 3) if accuracies[number - 1] != run.accuracy)
    assert evaluated(run, "--exit", str(other))[0] == accuracies[other - 1]
    assert evaluated(run, "--exit", "ensemble")[0] == run.critics["ensemble_accuracy"]


def test_shares_of_samples_and_operations_are_told_by_exit(run: WithExits) -> None:
    accuracy, (*rows, last) = evaluated(run, "--exit-confidence", str(CONFIDENCE))
    assert accuracy == run.critics["early_accuracy"] and run.critics["exit_confidence"] == CONFIDENCE
    parts = [re.split(r"\s\s+", row.strip().replace(" %", "")) for row in rows]
    samples = [float(part[2]) / 100 for part in parts]
    assert samples == pytest.approx(run.critics["samples_by_exit"], abs=1e-3) and 0 < samples[0] < 1
    costs, spent = [float(part[3]) / 100 for part in parts], [float(part[4]) / 100 for part in parts]
    assert costs == pytest.approx(run.critics["flops_by_exit"], abs=1e-3) and costs == sorted(costs)
    mean = sum(share * cost for share, cost in zip(samples, costs))
    assert spent == pytest.approx([share * cost / mean for share, cost in zip(samples, costs)], abs=3e-3)
    assert f"{100 * run.critics['early_flops']:.1f} % of the FLOPs" in last


def test_a_sample_leaves_at_the_first_exit_that_is_sure(run: WithExits) -> None:
    applied, exits = run.applied, run.exits
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        each = [logits.softmax(1) for logits in exits(images)]
    # So that all exits are met.
    confidence = float(each[0].amax(1).median())
    answer = answering(applied, exit_at=None, confidence=confidence)
    logits, expected = answer(images), []
    for row in range(len(images)):
        sure = [number for number, found in enumerate(each) if float(found[row].max()) >= confidence]
        expected.append(sure[0] if sure else 3)
        torch.testing.assert_close(logits[row].softmax(0), each[expected[-1]][row], rtol=1e-4, atol=1e-5)
    assert len(set(expected)) > 1
    assert [columns["exit"] - 1 for columns in answer.take(16)] == expected
    assert first_sure(torch.stack(each), confidence).tolist() == expected


def test_who_leaves_early_costs_no_later_group(run: WithExits, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    go = EarlyExits.group

    def watched(self: EarlyExits, number: int, x: Tensor) -> Tensor:
        seen.append((number, len(x)))
        return go(self, number, x)

    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    answer = answering(run.applied, exit_at=None, confidence=0.2)
    monkeypatch.setattr(EarlyExits, "group", watched)
    answer(images)
    assert seen == [(0, 8)], "every class's probability is a third at least where there are three"
    seen.clear()
    answering(run.applied, exit_at="2", confidence=None)(images)
    assert [number for number, rows in seen if rows == 8] == [0, 1]


def test_work_is_that_of_groups_and_critics(run: WithExits) -> None:
    exits, image = run.exits, torch.zeros(1, 3, 16, 16)
    parts = exits.work(image)
    # Two operations a product: 8 x 8 cells of 16 channels, 64 kernels of 3 x 3; then 4 x 4 x 64 numbers, 3 classes.
    assert parts[0][1] == 2 * (64 * 16 * 64 * 9 + 1024 * 3) and parts[3][1] == 0
    assert work_until(parts)[3] == sum(map(sum, parts))
    leaving = answering(run.applied, exit_at="2", confidence=None)
    assert isinstance(leaving, Leaving)
    leaving(torch.zeros(4, 3, 16, 16))
    leaving.take(3)
    share = (parts[0][0] + sum(parts[1])) / sum(group for group, _ in parts)
    assert f"{100 * share:.1f} % of the FLOPs" in leaving.told(), "the first critic is not asked"


def test_predict_names_each_files_exit_and_tells_shares_beside_the_table(run: WithExits, tmp_path: Path) -> None:
    flags = ["--exit-confidence", str(CONFIDENCE)]
    outcome = call("predict", str(run.run), str(run.images), *flags)
    rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    left = [sum(row["exit"] == str(number) for row in rows) / 21 for number in (1, 2, 3, 4)]
    assert left == pytest.approx(run.critics["samples_by_exit"])
    assert outcome.stderr.startswith("exit ") and "of the FLOPs of the whole model" in outcome.stderr
    out = tmp_path / "answers.csv"
    written = call("predict", str(run.run), str(run.images), *flags, "--out", str(out))
    assert out.read_text() == outcome.stdout and outcome.stderr in written.stdout and written.stderr == ""
    whole = call("predict", str(run.run), str(run.images))
    assert "exit" not in whole.stdout.splitlines()[0] and whole.stderr == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--exit", "5"], "--exit (5) must be in 1..4"),
        (["--exit", "first"], "--exit (first) must be in 1..4"),
        (["--exit-confidence", "nan"], "--exit-confidence (nan) must be a probability"),
        (["--exit", "ensemble", "--exit-confidence", "0.9"], "does not go with --exit ensemble"),
    ],
)
def test_exits_that_are_none_are_refused(run: WithExits, flags: list[str], message: str) -> None:
    command = ["evaluate"] if "--exit" in flags else ["predict", str(run.images)]
    outcome = call(command[0], str(run.run), *command[1:], *flags)
    assert outcome.returncode == 2 and message in outcome.messages[0], str(outcome)


def test_other_models_have_no_exits(finished: Finished) -> None:
    for flags in (["--exit", "1"], ["--exit-confidence", "0.9"]):
        outcome = call("evaluate", str(finished.run), *flags)
        assert outcome.returncode == 2 and "--strategy local-critics" in outcome.messages[0], str(outcome)


def test_a_card_names_the_blocks_behind_exits(run: WithExits, tmp_path: Path) -> None:
    path = run.run / "model.yaml"
    assert list(read_card(path).exits) == [start for start, _ in run.critics["groups"]][1:]
    tree = yaml.safe_load(path.read_text())
    for wrong in ([3, 2], [0], "3", [True]):
        damaged = tmp_path / "model.yaml"
        damaged.write_text(yaml.safe_dump({**tree, "exits": wrong}))
        with pytest.raises(RefusedError, match="exits"):
            read_card(damaged)
    (tmp_path / "model.pt").write_bytes((run.run / "model.pt").read_bytes())
    for other in ([1, 2], [1, 2, 3, 4]):
        damaged.write_text(yaml.safe_dump({**tree, "exits": other}))
        with pytest.raises(RefusedError, match="local_critics"):
            hvfreeze.load_model(tmp_path)


def test_a_model_with_exits_is_where_another_run_starts(run: WithExits, finished: Finished, tmp_path: Path) -> None:
    flags = f"--model resnet20 --image-size 16 --epochs 1 --weights {run.run / 'model.pt'} --lr 1e-30 --momentum 0"
    train(finished.images, tmp_path / "next", flags + " --weight-decay 0")
    found, given = (torch.load(each / "model.pt", weights_only=True) for each in (tmp_path / "next", run.run))
    assert not [name for name in found if "critics" in name] and any("critics" in name for name in given)
    assert torch.equal(found["conv1.weight"], given["conv1.weight"]) and torch.equal(found["fc.bias"], given["fc.bias"])
    assert "ignoring the auxiliary heads" in (tmp_path / "next" / "log.txt").read_text()
    assert json.loads((tmp_path / "next" / "summary.json").read_text())["test_accuracy"] >= 0
