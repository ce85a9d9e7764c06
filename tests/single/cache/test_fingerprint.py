from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvfreeze.cache.faults import CacheMismatch
from hvfreeze.cache.file.reader import ActivationFile, refusals
from hvfreeze.cache.fingerprint import Fingerprint, digest_tensors
from tests.single.cache.material import make_fingerprint, make_keys, open_store, write_file

OTHER_IDENTITY: dict[str, Any] = {
    "prefix": "q" * 64,
    "operations": "n" * 64,
    "cut": 3,
    "data": {"name": "digits", "pixels": "e" * 64},
    "split": "test",
    "transform": {"mean": [0.5], "std": [0.26]},
    "data_seed": 1,
    "augment": "views:2",
    "dtype": "float16",
    "input_shape": (3, 16, 16),
    "memory_format": "contiguous",
    "precision": "bfloat16",
    "via": [1],
}


@pytest.mark.parametrize("name", OTHER_IDENTITY)
def test_a_file_is_refused_by_the_name_of_each_field_that_differs(name: str, tmp_path: Path) -> None:
    path = write_file(tmp_path)
    with pytest.raises(CacheMismatch, match=rf"{path}.*\b{name} \(file") as refused:
        ActivationFile(path, expected=make_fingerprint(**{name: OTHER_IDENTITY[name]}))
    assert str(refused.value).count("(file") == 1
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("name", ["torch", "processor"])
def test_a_file_from_other_software_or_another_processor_is_refused(name: str, tmp_path: Path) -> None:
    path = write_file(tmp_path)
    fingerprint = make_fingerprint()
    with pytest.raises(CacheMismatch, match=name):
        ActivationFile(
            path, expected=Fingerprint.of({**fingerprint.fields, name: "other"}, exactness=fingerprint.exactness)
        )


def test_only_files_of_the_same_split_and_cut_are_told_of_and_those_of_one_fingerprint_once(tmp_path: Path) -> None:
    for rank in range(3):
        write_file(tmp_path, first=40 * rank, shard=f"{rank}of3")
    assert len(list(tmp_path.glob("*.h5"))) == 3
    for other in ({"cut": 3}, {"split": "test"}):
        assert refusals(tmp_path, make_fingerprint(prefix="q" * 64, **other)) == []
    assert len(refusals(tmp_path, make_fingerprint(prefix="q" * 64))) == 1
    assert refusals(tmp_path, make_fingerprint()) == []


def test_a_file_under_the_name_of_another_fingerprint_is_refused(tmp_path: Path) -> None:
    other = make_fingerprint(cut=3)
    store = open_store(tmp_path, make_keys(40), fingerprint=other)
    write_file(tmp_path).rename(store.path)
    with pytest.raises(CacheMismatch, match="cut"):
        open_store(tmp_path, make_keys(40), fingerprint=other)


@pytest.mark.parametrize("changes", [{"batch_rows": 32}, {"threads": 2}])
def test_other_batch_rows_or_threads_are_a_hit_that_is_not_exact(changes: dict[str, int], tmp_path: Path) -> None:
    write_file(tmp_path)
    store = open_store(tmp_path, make_keys(40), fingerprint=make_fingerprint(**changes))
    assert store.complete and not store.exact
    assert open_store(tmp_path, make_keys(40)).exact


def test_one_bit_of_a_weight_or_of_a_running_statistic_changes_the_digest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = digest_tensors(model.state_dict().items())
    for name in ("0.weight", "1.running_var", "1.num_batches_tracked"):
        tensor = model.state_dict()[name]
        original = tensor.clone()
        bytes_of = tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
        bytes_of[0] ^= 1
        assert digest_tensors(model.state_dict().items()) != before, name
        tensor.copy_(original)
    assert digest_tensors(model.state_dict().items()) == before


def test_the_digest_of_tensors_covers_names_types_and_shapes_but_not_strides() -> None:
    x = torch.arange(8.0).reshape(2, 4)
    digests = {
        digest_tensors([("a", x)]),
        digest_tensors([("b", x)]),
        digest_tensors([("a", x.reshape(4, 2))]),
        digest_tensors([("a", x.view(torch.int32))]),
        digest_tensors([("a", x[:1]), ("a", x[1:])]),
    }
    assert len(digests) == 5
    assert digest_tensors([("a", x.t().contiguous().t())]) in digests


def test_a_fingerprint_does_not_depend_on_the_order_of_fields_or_on_tuples() -> None:
    assert Fingerprint.of({"a": 1, "b": (1, 2)}).digest == Fingerprint.of({"b": [1, 2], "a": 1}).digest
    assert Fingerprint.of({"a": 1}).digest != Fingerprint.of({"a": "1"}).digest
    with pytest.raises(ValueError, match=r"NaN|nan|JSON compliant"):
        Fingerprint.of({"a": float("nan")})
