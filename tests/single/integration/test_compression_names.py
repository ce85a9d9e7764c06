"""What a script's own optimizer may say of compression."""

from __future__ import annotations

from typing import Any

import pytest

from hvfreeze.errors import UsageError
from hvfreeze.integration.horovod_compat import compression_of


class FP16Compressor:
    """Called as Horovod's."""


def test_our_words_and_horovods_are_understood() -> None:
    assert [compression_of(value) for value in ("none", "powersgd:4", FP16Compressor)] == ["none", "powersgd:4", "fp16"]


@pytest.mark.parametrize("value", ["auto", 16])
def test_what_only_the_training_loop_can_measure_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="must be none, fp16, powersgd:R"):
        compression_of(value)
