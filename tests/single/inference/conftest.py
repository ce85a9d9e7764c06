"""A finished run on images of several sizes, which no test changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.program import call

CLASSES = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}
SIZES = ((36, 40), (44, 36), (36, 36))


@dataclass(frozen=True)
class Finished:
    """A run, and the images that it was trained and evaluated on."""

    run: Path
    images: Path

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "summary.json").read_text()))

    @property
    def last_epoch(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1]))


def save_images(folder: Path) -> Path:
    """Write 16 training and 7 test images a class: noise around a colour, larger noise the later they come."""
    noise = np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 7)):
        for name, colour in CLASSES.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                width, height = SIZES[number % len(SIZES)]
                pixels = np.array(colour) + noise.normal(0, 20 * (1 + number), (height, width, 3))
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                image.save(folder / part / name / f"{number:02d}.png")
    return folder


def train(images: Path, run: Path, flags: str) -> dict[str, Any]:
    """Train a small model on images in folders, and return summary.json's object."""
    words = f"--model shufflenet_v2_x0_5 --data imagefolder --batch-size 8 --threads 1 --quiet {flags}".split()
    outcome = call("train", *words, "--data-dir", str(images), "--run-dir", str(run))
    assert outcome.returncode == 0, str(outcome)
    return dict(json.loads((run / "summary.json").read_text()))


@pytest.fixture(scope="package")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Pixels of 36x36, which the model sees enlarged to 48x48; its last batch of evaluation is not full."""
    folder = tmp_path_factory.mktemp("inference")
    images = save_images(folder / "images")
    train(images, folder / "run", "--image-size 48 --epochs 6 --evaluate-every 6 --lr 0.005 --augment none")
    return Finished(folder / "run", images)


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Path:
    """The run's directory, to be damaged."""
    return Path(shutil.copytree(finished.run, tmp_path / "run"))
