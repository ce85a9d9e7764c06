from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hvfreeze.config.tree import from_dict
from hvfreeze.data.batches import Batch, Corpus, deal
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.settings import DataConfig
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.strategies.shared_trunk.features import Keys, worth_filling
from hvfreeze.strategies.shared_trunk.tasks import Labels, Task, read_files, read_labels, tasks_of
from tests.program import save_photos


def corpus(**data: Any) -> Corpus:
    return deal(open_data("digits"), DataConfig(**data), seed=0, batch_size=8, replicas=1)


def tasks_for(ranks: int, files: tuple[str, str] = ("", ""), **settings: Any) -> list[Task]:
    config = from_dict({"strategy": "shared-trunk", **settings})
    return tasks_of(config.strategy, config.optimizer, seed=config.run.seed, ranks=ranks, files=files)


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
        ("labels: nowhere.csv\ntasks: {a: {}}", "cannot be read"),
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
        ("row,a\n0,x", "no column sample"),
        ("sample,a\n99999,x", "line 2 of the label table: train has no sample 99999"),
        ("sample,a\n0,x\n1,", "has no label in column a"),
        ("sample,b\n0,x", "no column a"),
        (
            "sample,a\n0,x\n1,y\n0,y",
            "line 4 of the label table: sample 0 of train already has the label x in a, and y here",
        ),
        ("sample,a\n0,x\n0,", "already has the label x in a, and none here; keep one"),
        ("sample,a,a\n0,x,y", "has two columns a; remove or rename one"),
        ("sample,a\n0,x\n1,y,z", "line 3 of the label table has more cells than the 2 columns"),
    ],
)
def test_tables_that_lack_labels_are_refused(table: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        read_labels([Task(name="a", column="a", lr=1.0, seed=0)], table, corpus())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("split;sample;a\ntrain;0;x\n", r"must name the columns, separated by commas.*it is 'split;sample;a'"),
        ("split, sample, a\ntrain,0,x\n", "without spaces.*it is 'split, sample, a'"),
        ("", "must name the columns.*it is ''"),
        ('sample,a\n0,"' + "x" * 200000, "line 2 of .* is not valid CSV: field larger than"),
    ],
)
def test_tables_that_other_programs_write_otherwise_are_refused(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(RefusedError, match=message):
        named(tmp_path / "t.csv")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_a_table_may_end_in_any_way(end: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(end.join(["sample,a", "0,x", "1,y", ""]).encode())
    assert read_files(tmp_path / "t.csv") == ("", "sample,a\n0,x\n1,y\n")


def table_of(samples: Corpus, *, test: str) -> str:
    lines = [f"train,{row},{'odd' if row % 2 else 'even'}" for row in range(len(samples.train))]
    lines += [f"test,{row},{'odd' if row % 2 else test}" for row in range(len(samples.evaluated))]
    return "\n".join(["split,sample,a", *lines])


def test_a_label_that_no_training_sample_has_is_refused() -> None:
    samples, tasks = corpus(), [Task(name="parity", column="a", lr=1.0, seed=0)]
    told = "task parity: Even in column a of the test samples is not the label of any.*; those are even, odd"
    with pytest.raises(RefusedError, match=told):
        read_labels(tasks, table_of(samples, test="Even"), samples)
    (labels,) = read_labels(tasks, table_of(samples, test="even"), samples)
    assert labels.classes == ("even", "odd")
    # A line that says the same once more does no harm.
    (again,) = read_labels(tasks, table_of(samples, test="even") + "\ntrain,4,even", samples)
    assert again.identity() == labels.identity()


def test_a_label_that_only_held_out_samples_have_is_refused() -> None:
    samples, tasks = corpus(validation_fraction=0.5), [Task(name="parity", column="a", lr=1.0, seed=0)]
    odd_one = int(samples.evaluated_ids[0])
    words = {row: "Even" if row == odd_one else ("even", "odd")[row % 2] for row in range(len(samples.train))}
    with pytest.raises(
        RefusedError, match="Even in column a of the test samples is not the label of any training sample"
    ):
        read_labels(tasks, "\n".join(["sample,a", *(f"{row},{word}" for row, word in words.items())]), samples)


def test_a_label_that_only_samples_left_out_have_is_refused() -> None:
    samples, tasks = corpus(train_samples=20), [Task(name="parity", column="a", lr=1.0, seed=0)]
    left_out = next(row for row in range(len(samples.train)) if row not in samples.plan.shards[0])
    line = f"\ntrain,{left_out},"
    table = table_of(samples, test="rare").replace(f"{line}{'odd' if left_out % 2 else 'even'}\n", f"{line}rare\n")
    with pytest.raises(
        RefusedError, match="rare in column a of the test samples is not the label of any training sample"
    ):
        read_labels(tasks, table, samples)


def test_lines_of_the_test_set_are_not_read_where_training_samples_are_held_out() -> None:
    samples, tasks = corpus(validation_fraction=0.5), [Task(name="parity", column="a", lr=1.0, seed=0)]
    lines = [f"train,{row},{'odd' if row % 2 else 'even'}" for row in range(len(samples.train))]
    told = "\n".join(["split,sample,a", *lines])
    (alone,) = read_labels(tasks, told, samples)
    (both,) = read_labels(tasks, f"{told}\ntest,0,neither\ntest,owl/test0.png,even", samples)
    assert both.classes == ("even", "odd") and both.identity() == alone.identity()
    with pytest.raises(RefusedError, match="tests has no sample 0"):
        read_labels(tasks, f"{told}\ntests,0,even", samples)


def test_labels_may_be_any_text() -> None:
    samples, tasks = corpus(), [Task(name="power", column="a", lr=1.0, seed=0)]
    (labels,) = read_labels(tasks, table_of(samples, test="odd").replace("odd", "x").replace("even", "\u00b2"), samples)
    assert labels.classes == ("x", "\u00b2")


def test_a_sample_named_by_number_and_by_path_is_one(tmp_path: Path) -> None:
    save_photos(tmp_path)
    samples = deal(open_data("imagefolder", tmp_path), DataConfig(), seed=0, batch_size=8, replicas=1)
    lines = [f"train,{path},x" for path in samples.train.source.paths]  # type: ignore[union-attr]
    with pytest.raises(
        RefusedError, match="line 50 of the label table: sample 2 of train already has the label x in a"
    ):
        read_labels(
            [Task(name="a", column="a", lr=1.0, seed=0)], "\n".join(["split,sample,a", *lines, "train,2,y"]), samples
        )


def test_images_without_a_label_are_named_by_their_path_and_counted(tmp_path: Path) -> None:
    save_photos(tmp_path)
    samples = deal(open_data("imagefolder", tmp_path), DataConfig(), seed=0, batch_size=8, replicas=1)
    paths, last = samples.train.source.paths, samples.plan.shards[0][-1]  # type: ignore[union-attr]
    lines = [f"train,{path},x" for path in paths]
    lines[last] = f"train,{paths[last]},"
    told = f"sample {paths[last]} of train has no label in column a; label "
    for table, expected in (
        (lines, told),
        ([], f"of train has no label in column a, nor do {len(paths) - 1} more; label"),
    ):
        with pytest.raises(RefusedError, match=expected):
            read_labels([Task(name="a", column="a", lr=1.0, seed=0)], "\n".join(["split,sample,a", *table]), samples)


def test_a_column_of_one_value_is_no_task() -> None:
    samples = corpus(train_samples=20, validation_fraction=0.5)
    table = "\n".join(["sample,a", *(f"{i},x" for i in range(len(samples.train)))])
    with pytest.raises(RefusedError, match="one value only"):
        read_labels([Task(name="a", column="a", lr=1.0, seed=0)], table, samples)


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


def test_what_an_epoch_leaves_out_is_filled_in_with_it() -> None:
    found = worth_filling(rows(0, 1, 2, 3, 4), batches([2, 1], [0, 4]))
    assert found is not None and found.tolist() == rows(3).tolist()


def test_few_rows_that_many_batches_lack_are_filled_in_at_once() -> None:
    found = worth_filling(rows(1, 5, 9), batches([1, 2], [3, 5], [6, 7]))
    assert found is not None and sorted(found[:, 0].tolist()) == [1, 5, 9]


def test_nothing_is_filled_in_where_that_spares_nothing() -> None:
    assert worth_filling(rows(1, 2, 3, 4), batches([1, 2], [3, 4])) is None
    assert worth_filling(rows(1, 2, 3, 4, 5, 6, 7, 8), batches([1, 2])) is None


def test_paths_and_labels_of_a_table_may_write_accents_otherwise_than_the_folders(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    save_photos(tmp_path / "photos")
    for part in ("train", "test"):
        (tmp_path / "photos" / part / "a").rename(tmp_path / "photos" / part / decomposed)
    samples = deal(open_data("imagefolder", tmp_path / "photos"), DataConfig(), seed=0, batch_size=8, replicas=1)
    lines = [
        f"{split},{path.replace(decomposed, composed)},{(composed, decomposed, 'tea')[row % 3]}"
        for split, images in (("train", samples.train), ("test", samples.evaluated))
        for row, path in enumerate(images.source.paths)  # type: ignore[union-attr]
    ]
    [labels] = read_labels([Task(name="a", column="a", lr=1.0, seed=0)], "\n".join(["split,sample,a", *lines]), samples)
    assert labels.classes == (composed, "tea")
