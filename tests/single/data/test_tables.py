"""Labels from tables: columns by their names, classes, several labels, numbers; each error names file, line, column."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvfreeze.config.data import DataConfig
from hvfreeze.data.batches import deal
from hvfreeze.data.data_sets import DataSplits, open_data
from hvfreeze.data.table_files import read_table
from hvfreeze.data.tables import Columns, list_for_evaluation
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError

NAMES = [f"{number}.png" for number in range(24)]


def table(folder: Path, lines: Sequence[str], name: str = "labels.csv", encoding: str = "utf-8") -> Path:
    """A table, and an image for each of `NAMES`."""
    for number, each in enumerate(NAMES):
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (10 * number, 9, 9)).save(folder / each)
    (folder / name).write_bytes("\n".join(lines).encode(encoding))
    return folder / name


def opened(path: Path, **columns: str) -> DataSplits:
    columns_of = Columns(**columns)  # type: ignore[arg-type]
    return open_data(str(path), task=columns_of.task, columns=columns_of)


def rows(*cells: str, header: str = "image,label,split") -> list[str]:
    return [header, *(f"{name},{cell}" for name, cell in zip(NAMES, cells))]


SPLIT = rows("owl,train", "cat,train", "cat,train", "owl,test", "cat,test")


def test_names_become_classes_and_rows_their_splits(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, SPLIT))
    assert splits.train.classes == splits.test.classes == ("cat", "owl")
    assert splits.train.labels.tolist() == [1, 0, 0] and splits.test.labels.tolist() == [1, 0]
    assert splits.notes == ["labels.csv: images from column image, labels from label, splits from split"]
    assert splits.test.called(0) == str(tmp_path / "3.png")
    assert splits.train.decode(1)[0, 0, 0] == 10


def test_the_order_of_rows_changes_nothing(tmp_path: Path) -> None:
    first = opened(table(tmp_path, SPLIT))
    second = opened(table(tmp_path, [SPLIT[0], *SPLIT[:0:-1]]))
    assert first.train.identity(local=False) == second.train.identity(local=False)
    other = opened(table(tmp_path, [line.replace("1.png,cat", "1.png,owl") for line in SPLIT]))
    assert first.train.identity(local=False) != other.train.identity(local=False)


@pytest.mark.parametrize(
    ("name", "lines", "encoding"),
    [
        ("labels.tsv", [line.replace(",", "\t") for line in SPLIT], "utf-8"),
        ("labels.csv", [line.replace(",", ";") for line in SPLIT], "utf-8"),
        ("labels.csv", [line.replace(",", ", ") for line in SPLIT], "utf-8-sig"),
        ("LABELS.CSV", [re.sub(r"(\w+\.png)", r'"\1"', f"{line}\r") for line in SPLIT], "utf-8"),
        ("labels.csv", ["Image Path,Class-Name,Subset,Note", *(f"./{line}," for line in SPLIT[1:])], "utf-8"),
        ("labels.csv", [*SPLIT, "", ""], "utf-8"),
    ],
)
def test_the_usual_spellings_of_a_table_are_read(tmp_path: Path, name: str, lines: list[str], encoding: str) -> None:
    splits = opened(table(tmp_path, lines, name, encoding))
    assert splits.train.classes == ("cat", "owl") and splits.train.labels.tolist() == [1, 0, 0]


def test_parquet_is_read(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table(tmp_path, [])
    columns = {"path": NAMES[:5], "label": [3.0, 20.0, 20.0, 3.0, 20.0], "split": ["train"] * 3 + ["test"] * 2}
    parquet.write_table(arrow.table(columns), tmp_path / "labels.parquet")
    splits = opened(tmp_path / "labels.parquet")
    assert splits.train.classes == ("3", "20") and splits.train.labels.tolist() == [0, 1, 1]
    columns["label"][1] = None  # type: ignore[call-overload]
    parquet.write_table(arrow.table(columns), tmp_path / "labels.parquet")
    with pytest.raises(RefusedError, match=r"labels\.parquet, row 2, column label: no label"):
        opened(tmp_path / "labels.parquet")
    parquet.write_table(arrow.table({"image": [{"bytes": b"x"}] * 2, "label": [0, 1]}), tmp_path / "labels.parquet")
    with pytest.raises(RefusedError, match=r"row 1, column image must be text or a number; .* use --data hf:FILE"):
        opened(tmp_path / "labels.parquet")
    (tmp_path / "labels.parquet").write_bytes(b"PAR1")
    with pytest.raises(RefusedError, match="cannot be read as Parquet"):
        opened(tmp_path / "labels.parquet")


def test_parquet_asks_for_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labels.parquet").touch()
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"is Parquet, which needs pyarrow .*: pip install pyarrow$"):
        opened(tmp_path / "labels.parquet")


def test_whole_numbers_are_classes_in_their_order(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, rows("10,train", "9,train", "10.0,train", "9,test")))
    assert splits.train.classes == ("9", "10") and splits.train.labels.tolist() == [1, 0, 1]


def test_whole_numbers_with_a_sign_are_classes(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, rows("1,train", "-1,train", "+1.0,train", "-1.0,test")))
    assert splits.train.kind == "classes" and splits.train.classes == ("-1", "1")
    assert splits.train.labels.tolist() == [1, 0, 1] and splits.test.labels.tolist() == [0]


def test_without_splits_a_tenth_of_each_class_is_held_out(tmp_path: Path) -> None:
    lines = ["image,label", *(f"{name},{'ab'[number % 2]}" for number, name in enumerate(NAMES))]
    for columns, header in (({}, "image,label"), ({"split": "none"}, "image,label,split")):
        text = [header, *(f"{line}{',train' * (header.count(',') - 1)}" for line in lines[1:])]
        splits = opened(table(tmp_path, text), **columns)
        assert np.bincount(splits.test.labels.numpy()).tolist() == [1, 1] and len(splits.train) == 22
        assert "has no column for the split: a fixed 10% of each class is the test set, 2 of 24" in splits.notes[1]


def test_val_serves_as_the_test_set_unless_there_is_one(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, [line.replace("test", "validation") for line in SPLIT]))
    assert len(splits.test) == 2 and "2 val rows serve as the test set" in splits.notes
    splits = opened(table(tmp_path, [*SPLIT, "5.png,unknown,val"]))
    assert len(splits.test) == 2 and "1 val row is not used: accuracy is measured on test" in splits.notes


def test_a_second_table_has_the_test_samples(tmp_path: Path) -> None:
    test = table(tmp_path, ["image,label", "3.png,owl", "4.png,cat"], "test.csv")
    splits = opened(table(tmp_path, rows("owl", "cat", "cat", header="image,label")), test=str(test))
    assert splits.train.labels.tolist() == [1, 0, 0] and splits.test.labels.tolist() == [1, 0]
    test.write_text("image,class\n3.png,owl\n")
    with pytest.raises(RefusedError, match=r"test\.csv has labels in class, and .*labels\.csv in label"):
        opened(tmp_path / "labels.csv", test=str(test))


def test_columns_are_named_where_their_names_are_others(tmp_path: Path) -> None:
    lines = [line.replace("image,label,split", "where,species,part") for line in SPLIT]
    splits = opened(table(tmp_path, lines), image="where", label="species", split="part")
    assert splits.train.labels.tolist() == [1, 0, 0]
    with pytest.raises(
        UsageError, match=r"--label-column \(spices\) is not a column of .*, which has where, species, part"
    ):
        opened(tmp_path / "labels.csv", image="where", label="spices")


def test_images_may_lie_in_another_folder(tmp_path: Path) -> None:
    path = table(tmp_path, SPLIT)
    moved = path.rename(tmp_path.parent / f"{tmp_path.name}.csv")
    splits = open_data(str(moved), tmp_path)
    assert splits.train.decode(1)[0, 0, 0] == 10
    absolute = [SPLIT[0], *(f"{tmp_path}/{line}" for line in SPLIT[1:])]
    moved.write_text("\n".join(absolute))
    assert open_data(str(moved)).train.decode(1)[0, 0, 0] == 10


def test_several_columns_are_several_labels(tmp_path: Path) -> None:
    lines = rows("1,0,train", "0,1,train", "1,true,train", "0,0,test", header="image,cat,dog,split")
    words = [line.replace(",0", ",FALSE").replace(",1", ",TRUE") for line in lines]
    cases = [(lines, {"label": "cat,dog"}), (lines, {"task": "labels"}), (words, {"label": "cat,dog"})]
    for given, columns in cases:
        splits = opened(table(tmp_path, given), **columns)
        assert splits.train.kind == "labels" and splits.train.classes == ("cat", "dog")
        assert splits.train.labels.tolist() == [[1, 0], [0, 1], [1, 1]] and splits.test.labels.tolist() == [[0, 0]]
    assert "no test sample has label cat, dog" in splits.notes


def test_a_cell_with_a_delimiter_is_several_labels(tmp_path: Path) -> None:
    lines = rows('"cat, dog",train', "dog,train", ",train", "cat,test")
    for columns in ({"task": "labels"}, {"delimiter": ","}):
        splits = opened(table(tmp_path, lines), **columns)
        assert splits.train.kind == "labels" and splits.train.classes == ("cat", "dog")
        assert splits.train.labels.tolist() == [[1, 1], [0, 1], [0, 0]] and splits.test.labels.tolist() == [[1, 0]]
    splits = opened(table(tmp_path, [line.replace('"cat, dog"', "cat|dog") for line in lines]), delimiter="|")
    assert splits.train.labels.tolist() == [[1, 1], [0, 1], [0, 0]]


def test_an_index_or_weights_are_no_numbers_to_learn(tmp_path: Path) -> None:
    header = ",image,width,height,sample_weight,Unnamed: 0,__index_level_0__,split"
    lines = [
        header,
        *(f"{row},{NAMES[row]},{row}.5,2,1,{row},{row},train" for row in range(4)),
        "9,9.png,1,2,,9,9,test",
    ]
    splits = opened(table(tmp_path, lines), task="numbers")
    assert splits.train.classes == ("width", "height") and splits.train.labels[1].tolist() == [1.5, 2.0]
    assert splits.train.weights is not None and splits.train.weights.tolist() == [1, 1, 1, 1]


def test_a_table_of_test_rows_is_evaluated(tmp_path: Path) -> None:
    path = table(tmp_path, rows("owl,test", "cat,test", "cat,train"))
    assert list_for_evaluation(path, Columns()).paths == NAMES[:2]
    path = table(tmp_path, rows("owl,test", "cat,test"))
    assert list_for_evaluation(path, Columns()).paths == NAMES[:2]


def test_fractions_are_numbers(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, rows("1.5,train", "-2,train", "1e2,test")))
    assert splits.train.kind == "numbers" and splits.train.labels.tolist() == [[1.5], [-2.0]]
    lines = rows("1.5,3,train", "2,4,train", "0,0,test", header="image,x,y,split")
    splits = opened(table(tmp_path, lines), label="x,y")
    assert splits.train.kind == "numbers" and splits.train.classes == ("x", "y")
    splits = opened(table(tmp_path, rows("1,train", "2,train", "2,test")), task="numbers")
    assert splits.train.kind == "numbers" and splits.train.classes == ("label",)
    names = [f"{number % 10}.5" for number in range(24)]
    splits = opened(table(tmp_path, rows(*names, header="image,label")))
    assert len(splits.test) >= 1 and len(splits.train) + len(splits.test) == 24


REFUSED: dict[str, tuple[list[str], dict[str, str], str]] = {
    "an empty label": (rows("owl,train", ",train", "cat,test"), {}, "line 3, column label: no label; fill it in"),
    "NaN": (rows("owl,train", "NaN,train", "cat,test"), {}, "line 3, column label: 'NaN' is not a label"),
    "no number": (rows("1.5,train", "2.5,train", "x,test"), {}, "line 4, column label: 'x' must be a number"),
    "too large": (rows("1.5,train", "1e99,train", "2.5,test"), {}, "line 3, column label: '1e99' must be a number"),
    "neither 0 nor 1": (
        rows("1,0,train", "0,2,train", "0,0,test", header="image,cat,dog,split"),
        {"task": "labels"},
        "line 3, column dog: '2' must be 0 or 1; use --task numbers",
    ),
    "a class of the test set alone": (
        rows("owl,train", "cat,train", "dog,test"),
        {},
        "line 4, column label: class 'dog' is unknown to the training rows; add training rows",
    ),
    "a class in other letters": (rows("owl,train", "cat,train", "Cat,test"), {}, "class 'Cat' .*; write 'cat'"),
    "a label of the test set alone": (
        rows("owl|cat,train", "dog,test"),
        {"delimiter": "|"},
        "line 3, column label: label 'dog' is unknown to the training rows",
    ),
    "no label at all": (rows(",train", "a,test"), {"delimiter": "|"}, "column label: no training row has a label"),
    "an unknown split": (
        rows("owl,train", "cat,fold3"),
        {},
        "line 3, column split: 'fold3' must be train, val or test",
    ),
    "no test rows": (rows("owl,train", "cat,train"), {}, "column split: no test rows; use --split-column none"),
    "no training rows": (rows("owl,test", "cat,test"), {}, "column split: no training rows"),
    "one class": (rows("owl,train", "owl,test"), {}, r"column label: one class only \(owl\)"),
    "a long row": (rows("owl,train", "cat,train,1"), {}, "line 3: 4 fields, and the first line names 3 columns"),
    "a short row": (rows("owl,train", "cat"), {}, "line 3: 2 fields, and the first line names 3 columns"),
    "no rows": (["image,label"], {}, "labels.csv has no rows"),
    "an open quote": (rows('"owl,train', "cat,test"), {}, "line 3: unexpected end of data"),
    "no image": (["image,label,split", ",owl,train", "1.png,cat,test"], {}, "line 2, column image: no image"),
    "files that are gone": (
        [*SPLIT, "gone.png,cat,test", "lost.png,cat,test"],
        {},
        r"line 7, column image: .*gone\.png does not exist; .*line 8.*lost\.png .*relative to --data-dir",
    ),
    "too few numbers": (
        rows(*(f"{number}.5" for number in range(8)), header="image,label"),
        {},
        "has no column for the split: 8 images are too few to hold out a test set; provide a test set",
    ),
    "a path with a zero byte": ([*SPLIT, "\0.png,cat,test"], {}, r"line 7, column image: .* cannot be read \(.*null"),
    "a path that is too long": (
        [*SPLIT, f"{'x' * 300}.png,cat,test"],
        {},
        r"line 7, column image: .* cannot be read \(File name too long\)",
    ),
    "a file in a file": ([*SPLIT, "0.png/1.png,cat,test"], {}, "line 7, column image: .* does not exist"),
    "two classes": (
        [*SPLIT, "1.png,owl,train"],
        {},
        "line 7, column label: 1.png is 'owl' here and 'cat' on line 3; keep one row; for several labels",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_in_a_table_is_refused_by_line_and_column(tmp_path: Path, what: str) -> None:
    lines, columns, message = REFUSED[what]
    with pytest.raises(RefusedError, match=message) as refusal:
        opened(table(tmp_path, lines), **columns)
    assert "labels.csv" in str(refusal.value) and "\n" not in str(refusal.value)


UNCLEAR: dict[str, tuple[list[str], dict[str, str], str]] = {
    "no names": (SPLIT[1:], {}, r"has no column named image; name .* --image-column \(columns: 0\.png, owl, train\)"),
    "no labels": (rows("x,train", header="image,species,split"), {}, "has no column named label; .*--label-column"),
    "several": (
        rows("owl,1,train", header="image,label,class id,split"),
        {},
        "several columns for the label: label, class id; name the column with --label-column",
    ),
    "several splits": (
        rows("owl,train,a", header="image,label,split,subset"),
        {},
        "several columns for the split: split, subset; name the column with --split-column",
    ),
    "one name of two numbers": (
        rows("1,2,train", header="image,x,x,split"),
        {"task": "numbers"},
        r"--label-column \(x\) is the name of 2 columns",
    ),
    "an index alone": (
        ["Unnamed: 0,image", "0,0.png"],
        {"task": "numbers"},
        "has no column named label; name the column with --label-column",
    ),
    "a name twice": (
        rows("owl,owl", header="image,label,label"),
        {},
        r"--label-column \(label\) is the name of 2 columns",
    ),
    "several classes": (SPLIT, {"label": "label,split", "task": "classes"}, "must name one column with --task classes"),
    "a delimiter of classes": (
        SPLIT,
        {"delimiter": "|", "task": "classes"},
        r"--label-delimiter \(\|\) needs .* labels",
    ),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_columns_that_are_not_clear_ask_for_a_flag(tmp_path: Path, what: str) -> None:
    lines, columns, message = UNCLEAR[what]
    with pytest.raises(UsageError, match=message):
        opened(table(tmp_path, lines), **columns)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"labels\.csv does not exist; name a CSV, TSV or Parquet file"):
        read_table(tmp_path / "labels.csv")
    (tmp_path / "labels.csv").write_bytes("image,label\na.png,fran\u00e7ais\n".encode("latin-1"))
    with pytest.raises(RefusedError, match=r"line 2: not UTF-8 text .*; save it as UTF-8"):
        read_table(tmp_path / "labels.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(HvfreezeError, match="cannot be read"):
        read_table(tmp_path / "folder.csv")


def weighted(*cells: str, name: str = "sample_weight") -> list[str]:
    return [f"{line},{cell}" for line, cell in zip(SPLIT, (name, *cells), strict=True)]


def test_a_column_has_the_weights_of_training_rows(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, weighted("2", "0.5", "1e1", "x", "")))
    assert splits.train.weights is not None and splits.train.weights.tolist() == [2, 0.5, 10]
    assert splits.test.weights is None
    assert splits.notes[0].endswith("splits from split, weights from sample_weight")
    # Weights belong to paths: sample ids are in the order of these.
    turned = opened(table(tmp_path, [weighted("", "", "", "", "")[0], *weighted("2", "0.5", "1e1", "x", "")[:0:-1]]))
    assert turned.train.weights is not None and turned.train.weights.tolist() == [2, 0.5, 10]
    assert opened(tmp_path / "labels.csv", weight="none").train.weights is None
    other = table(tmp_path, weighted("1", "2", "3", "", "", name="trust"))
    assert opened(other).train.weights is None
    known = opened(other, weight="trust").train
    assert known.weights is not None and known.weights.tolist() == [1, 2, 3]
    # The caches of the samples remain valid, checkpoints of other weights do not.
    assert known.identity() == opened(other).train.identity()
    found = [
        deal(opened(other, **each), DataConfig(), seed=0, batch_size=2, replicas=1)
        for each in ({}, {"weight": "trust"})
    ]
    assert found[0].identities()["train"] != found[1].identities()["train"]


def test_a_column_of_other_weights_is_no_weight_of_samples(tmp_path: Path) -> None:
    """It may have kilograms."""
    path = table(tmp_path, weighted("1.5", "2", "3", "4", "5", name="weight"))
    assert opened(path).train.weights is None
    found = opened(path, weight="weight").train.weights
    assert found is not None and found.tolist() == [1.5, 2, 3]
    path = table(tmp_path, weighted("1.5", "2", "3", "4", "5"))
    assert opened(path, label="sample_weight").train.weights is None


def test_rows_of_weight_0_are_left_out(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, weighted("0", "2", "1", "", "")))
    assert len(splits.train) == 3 and splits.train.ids.tolist() == [1, 2]
    corpus = deal(splits, DataConfig(), seed=0, batch_size=2, replicas=1)
    assert sorted(corpus.plan.owned(0).tolist()) == [1, 2]
    assert "1 training image has weight 0: left out" in corpus.notes
    assert "class owl has no training image with a weight above 0" in corpus.notes


@pytest.mark.parametrize(
    ("cells", "columns", "message"),
    [
        (("1", "heavy", "1"), {}, r"line 3, column sample_weight: 'heavy' must be a weight, a number of at least 0"),
        (("-1", "1", "1"), {}, r"line 2, column sample_weight: '-1' must be a weight"),
        (("1", "inf", "1"), {}, r"line 3, column sample_weight: 'inf' must be a weight"),
        (("0", "0", "0"), {}, r"column sample_weight: all weights of training rows are 0; .* --weight-column none"),
        (
            ("1", "1", "1"),
            {"weight": "trust"},
            r"--weight-column \(trust\) is not a column of .*, which has image, label",
        ),
    ],
)
def test_weights_that_cannot_be_are_refused(
    cells: tuple[str, ...], columns: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(HvfreezeError, match=message):
        opened(table(tmp_path, weighted(*cells, "", "")), **columns)


def test_rows_that_repeat_an_image_are_counted(tmp_path: Path) -> None:
    splits = opened(table(tmp_path, [*SPLIT, "./1.png,cat,train"]))
    assert len(splits.train) == 4
    assert "labels.csv: 1 row repeats an image, such as 1.png; all rows count" in splits.notes


def test_shards_and_held_out_samples_have_each_class(tmp_path: Path) -> None:
    cells = [f"{'ab'[number % 2]},{'test' if number > 9 else 'train'}" for number in range(12)]
    data = DataConfig(data=str(table(tmp_path, rows(*cells))), validation_fraction=0.2)
    splits = opened(Path(data.data))
    corpus = deal(splits, data, seed=0, batch_size=2, replicas=2)
    held = corpus.train.labels[corpus.evaluated_ids]
    assert np.bincount(held.numpy()).tolist() == [1, 1]
    for shard in corpus.plan.shards:
        assert np.bincount(corpus.train.labels[shard].numpy()).tolist() == [2, 2]
