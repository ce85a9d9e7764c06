"""A run on a text: equal to plain PyTorch's, evaluated in bits per character, and its model continues a text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import hvfreeze
from hvfreeze.comm.replica_sync import parameter_digest
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.tree import from_dict
from hvfreeze.errors import UsageError
from hvfreeze.model.tiny_lm import TinyLM
from hvfreeze.training.build import prepare
from tests.program import call, succeed, summary_of
from tests.single.refusing import refused

TEXT = "".join(f"def f{n % 10}(x):\n    return x + {n % 7}\n\n" for n in range(120))
FLAGS = "--model tiny-lm --data text --context 16 --batch-size 8 --epochs 1 --optimizer adamw --lr 0.003 --threads 1"
FLAGS += " --train-samples 120"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    file, run = folder / "functions.py", folder / "run"
    file.write_text(TEXT)
    outcome = succeed("train", *FLAGS.split(), "--data-dir", str(file), "--run-dir", str(run))
    assert "bits per character" in outcome.stdout and "windows/s" in outcome.stdout
    return file, run


def test_a_run_is_plain_pytorch(finished: tuple[Path, Path], tmp_path: Path) -> None:
    file, run = finished
    summary = summary_of(run)
    words = FLAGS.replace("--", "").split()
    flags: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
    given = {name.replace("-", "_"): int(v) if v.isdigit() else v for name, v in flags.items()} | {"lr": 0.003}
    job = prepare(from_dict({**given, "data_dir": str(file), "run_dir": str(tmp_path / "data")}), SoloWorld())
    torch.manual_seed(0)
    model = TinyLM(len(job.card.classes), context=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    for batch in job.feed.epoch(0):
        loss = functional.cross_entropy(model(job.feed.images.load(batch.ids, batch.views)), batch.labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert parameter_digest(model) == summary["parameter_digest"]
    text = TEXT[len(TEXT) - len(TEXT) // 10 :]
    codes = torch.tensor([job.card.classes.index(character) for character in text])
    windows = (len(text) - 1) // 16
    with torch.no_grad():
        logits = model.eval()(codes[: windows * 16].view(windows, 16)).double()
    loss = functional.cross_entropy(logits, codes[1 : windows * 16 + 1].view(windows, 16)).item()
    assert summary["test_bits_per_character"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert summary["test_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_bits_per_character"] == summary["test_bits_per_character"] < 7
    assert last["train_bits_per_character"] == pytest.approx(last["train_loss"] / math.log(2))


def test_its_model_goes_on_from_a_text(finished: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = finished
    first, again, other = (
        call("predict", str(run), "def f1(x):", "--length", "40", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert first.returncode == 0 and first.stdout.startswith("def f1(x):"), str(first)
    assert len(first.stdout) == len("def f1(x):") + 41
    assert first.stdout == again.stdout != other.stdout
    out = tmp_path / "text.py"
    for temperature in ("0", "5e-324"):
        likely = succeed("predict", str(run), "def", "--temperature", temperature, "--length", "5", "--out", str(out))
        assert likely.stdout == f"5 characters: {out}\n", str(likely)
    applied, text = hvfreeze.load_model(run), "def"
    for _ in range(5):
        logits = applied.model(torch.tensor([[applied.classes.index(c) for c in text]]))[0, :-1, -1]
        text += applied.classes[int(logits.argmax())]
    assert out.read_text() == text


def test_it_is_evaluated_on_its_own_text_and_on_another(finished: tuple[Path, Path], tmp_path: Path) -> None:
    file, run = finished
    summary = summary_of(run)
    own = succeed("evaluate", str(run), "--out", str(tmp_path))
    assert "as the run reported" in own.stdout, str(own)
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["bits_per_character"] == pytest.approx(summary["test_bits_per_character"], rel=1e-12)
    other = call("evaluate", str(run), "--data-dir", str(file))
    assert f"{(len(TEXT) - 1) // 16 * 16} characters of functions.py" in other.stdout, str(other)
    huge = call("evaluate", str(run), "--data-dir", str(file), "--batch-size", f"{2**62}")
    assert huge.stdout.split()[:5] == other.stdout.split()[:5], str(huge)


@pytest.mark.seldom
def test_the_report_tells_bits_per_character(finished: tuple[Path, Path], tmp_path: Path) -> None:
    succeed("report", str(finished[1]), "--out", str(tmp_path))
    summary = summary_of(finished[1])
    page = (tmp_path / "index.html").read_text()
    assert "Bits per character" in page and f"{summary['test_bits_per_character']:.3f}" in page


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["predict", "RUN", ""], ["at least one character"]),
        (["predict", "RUN", "a", "--length", "0"], ["--length (0)", "at least 1"]),
        (["predict", "RUN", "a", "--temperature", "-1"], ["--temperature (-1.0)"]),
        (["predict", "RUN", "a", "--seed", f"{2**64}"], [f"--seed ({2**64})", "2^64-1"]),
        (["predict", "RUN", "a", "--seed", f"{-(2**63) - 1}"], [f"--seed ({-(2**63) - 1})", "-2^63"]),
        (["evaluate", "RUN", "--data-dir", "SHORT"], ["has 3 characters", "17"]),
        (["blocks", "tiny-lm"], ["tiny-lm", "text"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    finished: tuple[Path, Path], tmp_path: Path, words: list[str], fragments: list[str]
) -> None:
    (tmp_path / "short").write_text("def")
    places = {"RUN": str(finished[1]), "SHORT": str(tmp_path / "short")}
    refused(call(*[places.get(word, word) for word in words]), 2, *fragments)


def test_auto_takes_no_text() -> None:
    with pytest.raises(UsageError, match=r"--head \(multi-level\) must be last with --data text"):
        from_dict({"model": "tiny-lm", "data": "text", "freeze": "auto"})
