from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hvfreeze.config.data import DataConfig
from hvfreeze.config.tree import from_dict
from hvfreeze.data.batches import Batch, Corpus, deal
from hvfreeze.data.data_sets import open_data
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.strategies.shared_trunk.features import Keys, worth_filling
from hvfreeze.strategies.shared_trunk.tasks import Files, Labels, Task, read_files, read_labels, tasks_of
from tests.program import save_photos


def corpus(**data: Any) -> Corpus:
    return deal(open_data("digits"), DataConfig(**data), seed=0, batch_size=8, replicas=1)


def tasks_for(ranks: int, files: Files = ({}, None), **settings: Any) -> list[Task]:
    config = from_dict({"strategy": "shared-trunk", **settings})
    return tasks_of(config.strategy, config.optimizer, seed=config.run.seed, ranks=ranks, files=files)


PARITY = Task(name="parity", column="a", lr=1.0, seed=0)


def labels_in(text: str, samples: Corpus, folder: Path, *tasks: Task) -> Labels:
    """Return the labels of the first task, by default of a column `a`, in a table with this text."""
    (folder / "labels.csv").write_text(text)
    return read_labels([*tasks] or [PARITY], read_files(folder / "labels.csv")[1], samples)[0]


def named(path: Path, **changes: Any) -> list[Task]:
    return tasks_for(2, read_files(path), tasks=str(path), lr=0.5, seed=3, **changes)


def test_every_rank_gets_a_head_of_its_own_seed_unless_told_otherwise() -> None:
    tasks = tasks_for(3, seed=7, lr=0.5)
    assert [(t.name, t.seed, t.lr, t.blocks) for t in tasks] == [
        ("head0", 7, 0.5, 1),
        ("head1", 8, 0.5, 1),
        ("head2", 9, 0.5, 1),
    ]
    two = tasks_for(3, heads=2, head_lr="0.1,0.2", head_blocks=2)
    assert [(task.lr, task.blocks) for task in two] == [(0.1, 2), (0.2, 2)]
    with pytest.raises(UsageError, match="2 numbers for 3 heads"):
        tasks_for(3, head_lr="0.1,0.2")


def test_each_column_of_a_table_is_a_task(tmp_path: Path) -> None:
    path, samples = tmp_path / "labels.csv", corpus()
    train, test = samples.train.labels.tolist(), samples.evaluated.labels.tolist()
    rows = [f"train,{i},{'odd' if d % 2 else 'even'},{10 * d}" for i, d in enumerate(train)]
    rows += [f"test,{i},{'odd' if d % 2 else 'even'},{10 * d}" for i, d in enumerate(test)]
    path.write_text("\n".join(["split,sample,parity,tenfold", *rows]))
    tasks = named(path)
    assert [(t.name, t.column, t.seed) for t in tasks] == [("parity", "parity", 3), ("tenfold", "tenfold", 4)]
    parity, tenfold = read_labels(tasks, read_files(path)[1], samples)
    assert parity.classes == ("even", "odd") and tenfold.classes == tuple(str(10 * d) for d in range(10))
    assert torch.equal(parity.train, samples.train.labels % 2) and torch.equal(tenfold.test, samples.evaluated.labels)
    assert parity.identity() != tenfold.identity()


def test_a_table_need_only_hold_the_samples_that_are_used(tmp_path: Path) -> None:
    path, samples = tmp_path / "labels.csv", corpus(train_samples=20, validation_fraction=0.5)
    used = sorted([*samples.plan.shards[0].tolist(), *samples.evaluated_ids.tolist()])
    path.write_text("\n".join(["sample,half", *(f"{i},{i % 2}" for i in used)]))
    (labels,) = read_labels(named(path), read_files(path)[1], samples)
    assert labels.train[used].min() >= 0 or labels.test[used].max() >= 0
    assert sorted((labels.train >= 0).nonzero().flatten().tolist()) == sorted(samples.plan.shards[0].tolist())
    assert sorted((labels.test >= 0).nonzero().flatten().tolist()) == sorted(samples.evaluated_ids.tolist())


def test_yaml_says_more_of_a_task(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("sample,a\n0,x\n")
    path = tmp_path / "tasks.yaml"
    path.write_text("labels: labels.csv\ntasks:\n  one: {column: a, head: 2, lr: 1, loss: balanced, seed: 9}\n  a:\n")
    one, a = named(path)
    assert one == Task(name="one", column="a", blocks=2, lr=1.0, seed=9, loss="balanced")
    assert a == Task(name="a", column="a", blocks=1, lr=0.5, seed=4)
    path.write_text("tasks:\n  first: {head: linear}\n")
    assert named(path, head_blocks=3) == [Task(name="first", blocks=1, lr=0.5, seed=3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must have the key tasks"),
        ("tasks: {a: {}}\nother: 1", "must have the key tasks"),
        ("tasks: {}", "must have the key tasks"),
        ("tasks: {'../a': {}}", "names a file"),
        ("tasks: {a: {rate: 1}}", "only have the keys"),
        ("tasks: {a: {column: x}}", "has no key labels"),
        ("tasks: {a: {head: 0}}", r"head \(0\) must be linear"),
        ("tasks: {a: {head: big}}", r"head \(big\)"),
        ("tasks: {a: {lr: 0}}", r"lr \(0\)"),
        ("tasks: {a: {lr: .nan}}", r"lr \(nan\)"),
        ("tasks: {a: {seed: -1}}", r"seed \(-1\)"),
        ("tasks: {a: {loss: mse}}", r"loss \(mse\) must be one of cross-entropy"),
        ("tasks: {a: {}, A: {}}", "twice"),
        ("labels: nowhere.csv\ntasks: {a: {}}", "nowhere.csv does not exist"),
        ("tasks: [", "cannot be parsed as YAML"),
    ],
)
def test_task_files_that_say_what_cannot_be_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(HvfreezeError, match=message):
        named(tmp_path / "t.yaml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("row,a\n0,x", "must have one column sample, but its columns are row, a"),
        ("sample,b\n0,x", "must have one column a"),
        ("sample,a,a\n0,x,y", "must have one column a"),
        ("sample,a\n99999,x", "line 2, column sample: train has no sample 99999"),
        ("sample,a\n0,x\n1,", "has no label in column a"),
        ("sample,a\n0,x\n1,y\n0,y", "line 4, column a: sample 0 of train already has the label x, and y here; keep"),
        ("sample,a\n0,x\n0,", "already has the label x, and none here; keep one"),
        ("sample,a\n0,x\n1,y,z", "line 3: 3 fields"),
        ("", "has no rows"),
        ('sample,a\n0,"' + "x" * 200000, "line 2: field larger than"),
    ],
)
def test_tables_that_lack_labels_are_refused(table: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=message):
        labels_in(table, corpus(), tmp_path)


@pytest.mark.parametrize("text", ["sample,a\r\n0,x\r\n1,y", "sample;a\n0;x\n1;y", "sample, a\n0, x\n1,y\n"])
def test_tables_of_other_programs_are_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(text.encode())
    entries, table = read_files(tmp_path / "t.csv")
    assert table is not None and list(entries) == ["a"] and table.column("a") == ["x", "y"]


def table_of(samples: Corpus, *, test: str) -> str:
    lines = [f"train,{row},{'odd' if row % 2 else 'even'}" for row in range(len(samples.train))]
    lines += [f"test,{row},{'odd' if row % 2 else test}" for row in range(len(samples.evaluated))]
    return "\n".join(["split,sample,a", *lines])


UNKNOWN = "in column a of the test samples is not the label of any training sample"


def test_a_label_that_no_training_sample_has_is_refused(tmp_path: Path) -> None:
    samples = corpus()
    with pytest.raises(RefusedError, match=f"task parity: Even {UNKNOWN}; those are even, odd"):
        labels_in(table_of(samples, test="Even"), samples, tmp_path)
    labels = labels_in(table_of(samples, test="even"), samples, tmp_path)
    assert labels.classes == ("even", "odd")
    # A line that says the same once more does no harm.
    again = labels_in(table_of(samples, test="even") + "\ntrain,4,even", samples, tmp_path)
    assert again.identity() == labels.identity()
    # Training samples that the run leaves out teach nothing.
    some = corpus(train_samples=20)
    left_out = next(row for row in range(len(some.train)) if row not in some.plan.shards[0])
    line = f"\ntrain,{left_out},"
    table = table_of(some, test="rare").replace(f"{line}{'odd' if left_out % 2 else 'even'}\n", f"{line}rare\n")
    with pytest.raises(RefusedError, match=f"rare {UNKNOWN}"):
        labels_in(table, some, tmp_path)


def test_training_samples_that_are_held_out_are_the_test_samples(tmp_path: Path) -> None:
    samples = corpus(validation_fraction=0.5)
    words = {row: ("even", "odd")[row % 2] for row in range(len(samples.train))}
    told = "\n".join(["split,sample,a", *(f"train,{row},{word}" for row, word in words.items())])
    alone = labels_in(told, samples, tmp_path)
    both = labels_in(f"{told}\ntest,0,neither\ntest,owl/test0.png,even", samples, tmp_path)
    assert both.classes == ("even", "odd") and both.identity() == alone.identity(), "the test set's lines were read"
    with pytest.raises(RefusedError, match="tests has no sample 0"):
        labels_in(f"{told}\ntests,0,even", samples, tmp_path)
    odd_one = int(samples.evaluated_ids[0])
    with pytest.raises(RefusedError, match=f"Even {UNKNOWN}"):
        labels_in(told.replace(f"\ntrain,{odd_one},{words[odd_one]}", f"\ntrain,{odd_one},Even"), samples, tmp_path)


def test_labels_may_be_any_text(tmp_path: Path) -> None:
    samples = corpus()
    text = table_of(samples, test="odd").replace("odd", "x").replace("even", "\u00b2")
    assert labels_in(text, samples, tmp_path).classes == ("x", "\u00b2")


def photos(folder: Path) -> tuple[Corpus, list[str]]:
    """Return samples from image files, and the paths of the training samples."""
    samples = deal(open_data("imagefolder", folder), DataConfig(), seed=0, batch_size=8, replicas=1)
    return samples, list(samples.train.source.paths)  # type: ignore[union-attr]


def test_images_are_named_by_number_or_path_and_counted_if_they_have_no_label(tmp_path: Path) -> None:
    save_photos(tmp_path / "photos")
    samples, paths = photos(tmp_path / "photos")
    header, lines, last = "split,sample,a", [f"train,{path},x" for path in paths], samples.plan.shards[0][-1]
    with pytest.raises(RefusedError, match="line 50, column a: sample 2 of train already has the label x"):
        labels_in("\n".join([header, *lines, "train,2,y"]), samples, tmp_path)
    with pytest.raises(RefusedError, match=f"has no label in column a, nor do {len(paths) - 2} more; label"):
        labels_in("\n".join([header, lines[0]]), samples, tmp_path)
    lines[last] = f"train,{paths[last]},"
    with pytest.raises(RefusedError, match=f"sample {paths[last]} of train has no label in column a; label "):
        labels_in("\n".join([header, *lines]), samples, tmp_path)


def test_a_column_of_one_value_is_no_task(tmp_path: Path) -> None:
    samples = corpus(train_samples=20, validation_fraction=0.5)
    with pytest.raises(RefusedError, match="one value only"):
        labels_in("\n".join(["sample,a", *(f"{i},x" for i in range(len(samples.train)))]), samples, tmp_path)


def test_in_a_balanced_loss_all_classes_count_the_same() -> None:
    labels = Labels(("a", "b"), torch.tensor([0, 0, 0, 1, -1]), torch.tensor([0]))
    weights = labels.weights("balanced")
    assert weights is not None and (weights * torch.tensor([3.0, 1.0])).tolist() == [2.0, 2.0]
    assert labels.weights("cross-entropy") is None
    logits = torch.zeros(4, 2, requires_grad=True)
    functional.cross_entropy(logits, labels.train[:4], weight=weights).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad.sum(0).abs().max() < 1e-7


def batches(*ids: list[int]) -> list[Batch]:
    return [Batch(np.array(i), np.zeros(len(i), np.int64), torch.zeros(len(i)), len(i)) for i in ids]


def rows(*ids: int) -> Keys:
    return np.array([[i, 0] for i in ids], dtype=np.int64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("missing", "due", "filled"),
    [
        # What an epoch leaves out, with it.
        (rows(0, 1, 2, 3, 4), batches([2, 1], [0, 4]), [3]),
        # Few rows that many batches lack.
        (rows(1, 5, 9), batches([1, 2], [3, 5], [6, 7]), [1, 5, 9]),
        # Nothing, if that spares nothing.
        (rows(1, 2, 3, 4), batches([1, 2], [3, 4]), []),
        (rows(1, 2, 3, 4, 5, 6, 7, 8), batches([1, 2]), []),
    ],
)
def test_rows_are_filled_in_if_that_spares_batches(missing: Keys, due: list[Batch], filled: list[int]) -> None:
    assert sorted(worth_filling(missing, due)[:, 0].tolist()) == filled


def test_paths_and_labels_of_a_table_may_write_accents_otherwise_than_the_folders(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    save_photos(tmp_path / "photos")
    for part in ("train", "test"):
        (tmp_path / "photos" / part / "a").rename(tmp_path / "photos" / part / decomposed)
    samples, _ = photos(tmp_path / "photos")
    lines = [
        f"{split},{path.replace(decomposed, composed)},{(composed, decomposed, 'tea')[row % 3]}"
        for split, images in (("train", samples.train), ("test", samples.evaluated))
        for row, path in enumerate(images.source.paths)  # type: ignore[union-attr]
    ]
    assert labels_in("\n".join(["split,sample,a", *lines]), samples, tmp_path).classes == (composed, "tea")
