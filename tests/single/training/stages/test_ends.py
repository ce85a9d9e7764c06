"""Runs of stages end with a model that can be applied, and with the better one, whichever stages come last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hvfreeze.heads.solve import FitTerms
from hvfreeze.model.model_sources import build_model
from hvfreeze.runs.reading import load_run
from hvfreeze.strategies.base import MODEL
from hvfreeze.training import auto, auto_plan, build, loop, time_budget
from hvfreeze.training.evaluation import Score
from hvfreeze.training.stages import Stage
from hvfreeze.training.time_budget import TimeBudget
from hvfreeze.training.trial import Judge
from tests.kept.small_model import small
from tests.program import call

SMALL = "--model shufflenet_v2_x0_5 --train-samples 60 --batch-size 16 --threads 1 --pool 1 --freeze auto".split()
SMALL += ["--validation-fraction", "0.3", "--auto-without"]


def train(folder: Path, *flags: str) -> dict[str, Any]:
    """Train, and check that the model can be applied and is as right as the summary says."""
    outcome = call("train", *SMALL, *flags, "--run-dir", str(folder), "--quiet")
    assert outcome.returncode == 0, str(outcome)
    applied = call("evaluate", str(folder))
    assert applied.returncode == 0 and "as the run reported" in applied.stdout, str(applied)
    return dict(json.loads((folder / "summary.json").read_text()))


@pytest.mark.parametrize("without", ["last-solve", "last-solve,guard"])
def test_a_stage_that_there_was_no_time_for_leaves_the_model_of_the_one_before(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeBudget, "_room", lambda *_, **__: 0)
    summary = train(tmp_path / "run", without, "--time-budget", "1h")
    assert {stage["stage"]: stage["steps"] for stage in summary["stages"]}["tune"] == 0
    assert "head: kernel:1" in (tmp_path / "run/model.yaml").read_text()


def test_a_first_tuning_that_there_was_no_time_for_is_not_on_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many samples the first tuning is the trial, and a head is solved alone where its time is not enough."""
    model = build_model("shufflenet_v2_x0_5", num_classes=10, image_size=32).model
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    monkeypatch.setattr(auto_plan, "MANY", 10)
    monkeypatch.setattr(time_budget, "UNMEASURED", 1e6)
    flags = ("--time-budget", "1h", "--weights", str(tmp_path / "weights.pt"))
    summary = train(tmp_path / "run", "votes", *flags)
    assert [(stage["stage"], stage["steps"] > 0) for stage in summary["stages"]][:2] == [
        ("tune", False),
        ("solve", True),
    ]
    assert "head: kernel:1" in (tmp_path / "run/model.yaml").read_text()


def test_a_run_goes_on_in_the_stages_that_it_began_with_whatever_the_clock_says_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is busier by then, there would be another warm-up, other batches, or no time to begin."""
    made, auto_stages = list[tuple[Stage, ...]](), build.auto_stages

    def stages(*given: Any) -> tuple[Stage, ...]:
        made.append(auto_stages(*given))
        return made[-1]

    monkeypatch.setattr(build, "auto_stages", stages)
    monkeypatch.setattr(TimeBudget, "_room", lambda *_, **__: 6)
    for passes, reserve in ((1000.0, 1.0), (50.0, 1e6)):
        monkeypatch.setattr(build, "passes_left", lambda *_, passes=passes, **__: passes)
        monkeypatch.setattr(time_budget, "reserve_of", lambda _, reserve=reserve: reserve)
        train(tmp_path / "run", "votes", "--time-budget", "1h", "--resume")
    first, second = made
    assert first == second and any(stage.steps and not stage.solves for stage in first)


@pytest.mark.parametrize("head_fit", ["kernel", "exact"])
def test_a_tuned_model_that_no_solution_follows_is_taken_back_unless_it_is_better(
    head_fit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = train(tmp_path / "solved", "votes", "--epochs", "1", "--head-fit", head_fit)
    assert [stage["stage"] for stage in solved["stages"]] == ["solve"]
    flags = ["last-solve", "--epochs", "2", "--head-fit", head_fit]
    for name, loss in (("better", 1e-9), ("worse", 9.0)):
        monkeypatch.setattr(auto, "score_of", lambda *_, loss=loss, **__: Score(loss, 0.5))
        summary = train(tmp_path / name, *flags)
        tuned = {stage["stage"]: stage for stage in summary["stages"]}["tune"]
        assert tuned["steps"] > 0 and tuned["kept"] is (name == "better")
        taken_back = summary["parameter_digest"] == solved["parameter_digest"]
        assert taken_back is (name == "worse"), "the model is not that of the stage that was kept"
    again = call("train", *SMALL, *flags, "--run-dir", str(tmp_path / "worse"), "--resume")
    assert "is complete" in again.stdout, str(again)
    (tmp_path / "worse" / "summary.json").unlink()
    assert train(tmp_path / "worse", *flags, "--resume")["parameter_digest"] == solved["parameter_digest"]


@pytest.mark.parametrize("flags", ["--epochs 40", "--time-budget 1h"])
def test_a_head_behind_a_trial_that_was_gone_on_from_is_not_chosen_by_what_the_trial_has_seen(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few samples judge, of which chance may do more, and where no time is left to go on."""
    torch.save(small(10).state_dict(), tmp_path / "w.pt")
    monkeypatch.setattr(Judge, "begin", lambda *_, **__: 1.0)
    monkeypatch.setattr(Judge, "loss", lambda *_: 0.83)
    monkeypatch.setattr(TimeBudget, "_room", lambda budget, *_, **__: 0 if budget._spent else 60)
    terms, make_terms = list[FitTerms](), loop.FitTerms
    monkeypatch.setattr(loop, "FitTerms", lambda **given: terms.append(make_terms(**given)) or terms[-1])
    words = f"train --model tests.kept.small_model:small --weights {tmp_path / 'w.pt'} --train-samples 60 --threads 1"
    outcome = call(*words.split(), "--freeze", "auto", *flags.split(), "--run-dir", str(tmp_path / "run"))
    assert outcome.returncode == 0 and "blocks still gain" in outcome.stdout, str(outcome)
    assert [each.trained for each in terms] == [True]


def test_a_run_that_keeps_the_tuned_models_own_last_layer_is_shown_with_what_that_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last evaluation comes after the last epoch's, which is of the solved head."""
    monkeypatch.setattr(auto, "score_of", lambda *_, **__: Score(0.0, 1.0))
    monkeypatch.setattr(loop, "evaluate", lambda *_: {MODEL: Score(9.0, 0.01)})
    summary = train(tmp_path / "run", "votes", "--epochs", "6")
    assert summary["head"] is None and summary["final_cut"] == 0
    assert summary["best_test_accuracy"] == summary["test_accuracy"] > 0.01
    run = load_run(tmp_path / "run")
    assert (run.best_accuracy, run.final_cut) == (summary["test_accuracy"], 0)


def test_held_out_samples_score_a_tuned_model_as_they_do_a_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge of a tuned model, asked about the solution itself, finds what chose its penalty."""
    jobs, before = [], auto.judge

    def judge(job: Any) -> None:
        if job.stage.solves:
            jobs.append(job)
            held_out, chosen = job.guard.held_out, job.solved.chosen
            score = auto.score_of(job.stage_runner.opened.chain, held_out, precision="float32", world=job.world)
            # The last fit has seen these samples too.
            assert score.accuracy >= chosen.held_out_accuracy and score.loss < chosen.held_out_loss
            assert sum(batch.counted for batch in held_out.batches) == 4, "a tenth of 42 digits, which are not mirrored"
        before(job)

    monkeypatch.setattr(loop, "judge", judge)
    train(tmp_path / "run", "last-solve", "--epochs", "2")
    assert len(jobs) == 1
