"""The program beside a checkpoint that is damaged, of another run, or means harm: refused, or gone round.

And what a whole one keeps, and one that was interrupted leaves.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.data.decoding import Images
from hvfreeze.runs import checkpoint_file as checkpoint
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.samples.opening import load_share, open_corpus
from hvfreeze.training import checkpoint as saving
from tests.program import call, digest_of, save_photos, succeed, summary_of
from tests.single.training.forging import Evil, forged, save_sections

SMALL = ["--model", "mlp-16x16", "--train-samples", "64", "--batch-size", "16", "--epochs", "2"]
SMALL += ["--threads", "1", "--freeze", "linear", "--interval", "3", "--freeze-warmup", "2", "--checkpoint-every", "1"]


def resume(folder: Path) -> Any:
    return call("train", *SMALL, "--run-dir", str(folder), "--resume")


def refused(folder: Path, words: str) -> None:
    """Resuming ends with one message, in which the words are, and with no summary."""
    outcome = resume(folder)
    assert outcome.returncode == 3 and len(outcome.messages) == 1, str(outcome)
    assert words in outcome.messages[0] and not (folder / "summary.json").exists(), str(outcome)


def stopped_before_its_end(finished: Path, folder: Path) -> Path:
    """A copy of a run that may be resumed; its newest checkpoint's path is returned."""
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    newest = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    return newest


def test_the_program_refuses_a_damaged_checkpoint_and_goes_on_from_the_one_before(
    finished: Path, tmp_path: Path
) -> None:
    folder, probe, code = tmp_path / "run", tmp_path / "code-was-run", io.BytesIO()
    newest = stopped_before_its_end(finished, folder)
    whole, opened = newest.read_bytes(), checkpoint.open_checkpoint(newest, size=1)
    shared, own = (bytes(opened.section(number).numpy()) for number in range(2))
    logs = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "decisions.jsonl")}
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    torch.save({"step": opened.step, "evil": Evil(probe)}, code)
    evil = [forged(*sections, step=opened.step) for sections in ((code.getvalue(), own), (shared, code.getvalue()))]
    damaged = f"{newest} is damaged"
    for content, words in (
        (bytes(flipped), damaged),
        (whole[:-1], damaged),
        (b"", damaged),
        *((each, "contains more than plain values") for each in evil),
    ):
        newest.write_bytes(content)
        refused(folder, words)
        assert not probe.exists()
    pickle.loads(pickle.dumps(Evil(probe)))
    assert probe.exists(), "the object is harmless, this test proves nothing"
    assert {name: (folder / name).read_bytes() for name in logs} == logs
    newest.unlink()
    resumed = resume(folder)
    assert resumed.returncode == 0, str(resumed)
    assert digest_of(folder) == digest_of(finished)
    assert (folder / "decisions.jsonl").read_bytes() == logs["decisions.jsonl"]


def test_the_program_refuses_a_checkpoint_of_another_model_or_setting(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    newest = stopped_before_its_end(finished, folder)
    opened = checkpoint.open_checkpoint(newest, size=1)
    shared, own = (checkpoint.unpacked(opened.section(number), name="") for number in range(2))
    for leaf, other in (("model", "alexnet"), ("seed", 7), ("lr", 0.5), ("freeze", "static"), ("augment", "none")):
        before = shared["run"][leaf]
        forged_state = {**shared, "run": {**shared["run"], leaf: other}}
        save_sections(newest.parent, [checkpoint.packed(forged_state), checkpoint.packed(own)], step=opened.step)
        refused(folder, f"another run ({leaf}: {other!r} before, {before!r} now)")


def test_auto_is_not_resumed_with_other_epochs_or_ranks_nor_from_a_checkpoint_without_a_journal(tmp_path: Path) -> None:
    words = "auto digits --model tests.kept.small_model:small --train-samples 60 --batch-size 8 --threads 1"
    flags = [*words.split(), "--run-dir", str(tmp_path), "--epochs"]
    succeed(*flags, "4")
    ended = digest_of(tmp_path)
    outcome = call(*flags, "6", "--resume")
    assert outcome.returncode == 3 and "auto: epochs: 4 before, 6 now" in outcome.messages[0], str(outcome)
    assert "is complete" in call(*flags, "4", "--resume").stdout and digest_of(tmp_path) == ended
    newest = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    shared, own = states_in(newest)
    of_two = [checkpoint.packed(state) for state in (shared, own, own)]
    del shared["journal"]
    shared["course"] = {"number": 1, "names": ["try", "solve"], "steps": [4, 7], "earlier": {}}
    save_sections(newest.parent, [checkpoint.packed(shared), checkpoint.packed(own)], step=shared["step"])
    outcome = call(*flags, "4", "--resume")
    assert outcome.returncode == 3 and "has no journal: an earlier version" in outcome.messages[0], str(outcome)
    save_sections(newest.parent, of_two, step=shared["step"])
    for inexact in ([], ["--resume-inexact"]):
        outcome = call(*flags, "4", "--resume", *inexact)
        assert outcome.returncode == 3 and "--resume-inexact" not in outcome.stderr, str(outcome)
        assert "written by 2 ranks" in outcome.messages[0] and "resume on 2 ranks, or start" in outcome.messages[0]
    assert digest_of(tmp_path) == ended, "nothing is lost"


def test_the_program_refuses_a_checkpoint_of_images_that_were_replaced_by_others_of_their_size(tmp_path: Path) -> None:
    photos, folder = save_photos(tmp_path / "photos", training=40), tmp_path / "run"
    for path in sorted(photos.rglob("*.png")):
        # Every file has the same size.
        Image.open(path).save(path.with_suffix(".bmp"))
        path.unlink()
    words = f"train --model mlp-16x16 --data imagefolder --data-dir {photos} --batch-size 16 --threads 1"
    flags = [*words.split(), "--checkpoint-every", "1", "--run-dir", str(folder)]
    succeed(*flags, "--epochs", "1")
    for name, split in (("train/a/07.bmp", "train"), ("test/b/02.bmp", "test")):
        path, before = photos / name, (photos / name).read_bytes()
        times = path.stat()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        outcome = call(*flags, "--epochs", "2", "--resume")
        assert outcome.returncode == 3 and f"was trained on other data ({split})" in outcome.messages[0], str(outcome)
        path.write_bytes(before)
    succeed(*flags, "--epochs", "2", "--resume")


def test_the_program_refuses_logs_that_lack_lines(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped_before_its_end(finished, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    refused(folder, "metrics.jsonl has")
    assert (folder / "metrics.jsonl").read_text() == lines[0]


def states_in(path: Path) -> list[dict[str, Any]]:
    """What all ranks share, and what the only rank has of its own."""
    opened = checkpoint.open_checkpoint(path, size=1)
    return [checkpoint.unpacked(opened.section(number), name="") for number in range(2)]


def test_a_run_goes_on_by_its_configuration_wherever_its_weights_were_named_from(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, weights = tmp_path / "run", tmp_path / "w.pt"
    shutil.copy(finished / "model.pt", weights)
    monkeypatch.chdir(tmp_path)
    succeed("train", *SMALL, "--weights", "w.pt", "--statistics", "batch", "--run-dir", "run")
    newest = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    step, (shared, own) = checkpoint.open_checkpoint(newest, size=1).step, states_in(newest)
    assert shared["run"]["weights"] == str(weights)
    (tmp_path / "elsewhere").mkdir()
    # Checkpoints of before kept the path as it was given.
    for kept, place in ((str(weights), "elsewhere"), ("w.pt", ".")):
        state = {**shared, "run": {**shared["run"], "weights": kept}}
        save_sections(newest.parent, [checkpoint.packed(state), checkpoint.packed(own)], step=step)
        (folder / "summary.json").unlink()
        monkeypatch.chdir(tmp_path / place)
        succeed("train", "--run-dir", str(folder), "--resume")


MEAN = (0.25, 0.5, 0.75)


def weights_of(finished: Path, folder: Path) -> Path:
    """A run's model as weights, whose card tells of another mean than the data set's own."""
    weights, card = folder / "w.pt", yaml.safe_load((finished / "model.yaml").read_text())
    shutil.copy(finished / "model.pt", weights)
    card["image"]["mean"] = list(MEAN)
    weights.with_suffix(".yaml").write_text(yaml.safe_dump(card))
    return weights


def test_a_run_goes_on_only_with_the_mean_and_std_that_it_began_with(finished: Path, tmp_path: Path) -> None:
    folder, weights = tmp_path / "run", weights_of(finished, tmp_path)
    flags = ["train", *SMALL, "--weights", str(weights), "--statistics", "batch", "--run-dir", str(folder)]
    succeed(*flags)
    assert yaml.safe_load((folder / "model.yaml").read_text())["image"]["mean"] == list(MEAN)
    newest = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    shared, own = states_in(newest)
    weights.with_suffix(".yaml").unlink()
    (folder / "summary.json").unlink()
    outcome = call(*flags, "--resume")
    assert outcome.returncode == 3 and "trained on other data (normalisation)" in outcome.messages[0], str(outcome)
    # Checkpoints of before do not tell.
    shared["data"].pop("normalisation")
    save_sections(newest.parent, [checkpoint.packed(shared), checkpoint.packed(own)], step=shared["step"])
    succeed(*flags, "--resume")


class Rank1(SoloWorld):
    """A rank beside rank 0, which has found a card."""

    rank = 1

    def broadcast_object(self, value: Any, *, name: str, root: int = 0) -> Any:
        return (MEAN, (0.1, 0.2, 0.3)) if name == "statistics.of_rank_0" else value


def test_all_ranks_normalise_as_rank_0_finds_that_the_weights_want_it(finished: Path) -> None:
    config, world = from_dict({"train_samples": 64, "batch_size": 16, "weights": str(finished / "model.pt")}), Rank1()
    corpus = open_corpus(config, world, replicas=1, clock=PhaseClock(SET_UP_PHASES))
    feed, evaluated, *_ = load_share(config, world, corpus, replica=0, rows=16)
    for images in (feed.images, evaluated):
        assert isinstance(images, Images) and images.transform.mean == MEAN


def test_processor_seconds_are_those_of_all_jobs_of_a_run(finished: Path, tmp_path: Path) -> None:
    found = []
    for name, kept in (("new", {"processor_seconds": {"forward": 1e6}}), ("of before", {})):
        folder = tmp_path / name
        newest = stopped_before_its_end(finished, folder)
        shared, own = states_in(newest)
        assert own.pop("processor_seconds")["forward"] > 0
        parts = [checkpoint.packed(shared), checkpoint.packed({**own, **kept})]
        save_sections(newest.parent, parts, step=shared["step"])
        assert resume(folder).returncode == 0
        found.append(summary_of(folder)["cpu_seconds"] >= 1e6)
    assert found == [True, False]


def test_a_run_interrupted_in_the_middle_of_a_checkpoint_ends_and_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Noted(checkpoint.Saving):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "Saving", Noted)
    monkeypatch.setattr(saving, "sections_of_ranks", interrupted)
    assert call("train", *SMALL, "--run-dir", str(tmp_path / "run")).returncode == 130
    left = [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]
    made[0].release()
    assert left == [] and not list((tmp_path / "run" / "checkpoints").glob("step-*"))
