"""A run with its own recipe, size and normalisation: cached as uncached, and applied as it was evaluated."""

from __future__ import annotations

from pathlib import Path

import hvfreeze
from tests.program import call
from tests.single.inference.conftest import Finished, train

RECIPE = "--recipe random-resized-crop,trivial-augment --augment views:2 --resize 36"
FROZEN = "--model mlp-16x16 --lr 0.005 --image-size 32 --freeze static --cut 2 --epochs 3 --mean 0.4 --std 0.3"


def test_views_of_a_recipe_are_cached_and_the_model_sees_the_centre_normalised_alike(
    finished: Finished, tmp_path: Path
) -> None:
    cached = f"--cache on --cache-dir {tmp_path / 'cache'}"
    plain = train(finished.images, tmp_path / "plain", f"{RECIPE} {FROZEN}")
    kept = train(finished.images, tmp_path / "kept", f"{RECIPE} {FROZEN} {cached}")
    assert kept["parameter_digest"] == plain["parameter_digest"] and kept["cache"]["rows_read"] > 0
    other = train(finished.images, tmp_path / "other", f"--augment views:2 --resize 36 {FROZEN} {cached}")
    assert other["cache"]["rows_written"] > 0, "rows of another recipe were read"
    listed = call("cache", "ls", str(tmp_path / "cache")).stdout
    assert "Mlp" in listed and "imagefolder" in listed, "the model and the data set are named"
    image = hvfreeze.load_model(tmp_path / "kept").transform
    assert (image.height, image.cropped_to, image.enlarged_to, image.shape) == (36, 32, None, (3, 32, 32))
    assert (image.mean, image.std) == ((0.4,) * 3, (0.3,) * 3)
    assert "as the run reported" in call("evaluate", str(tmp_path / "kept")).stdout
