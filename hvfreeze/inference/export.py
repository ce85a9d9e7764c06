"""`hvfreeze export`: a finished run's model as a file that runs without hvfreeze, checked against the model.

ONNX and PyTorch files take pixels, (batch, 3, H, W) uint8 in RGB, and contain the normalization, the network and the
head, also a fitted one; H and W, and how images are made to fit, are in the file. Safetensors files are a state_dict,
and a folder of transformers has the model, its own last layer and its image processor.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvfreeze import __version__
from hvfreeze.errors import HvfreezeError, RefusedError, UsageError
from hvfreeze.inference.card import Preparation
from hvfreeze.inference.evaluate import own_samples
from hvfreeze.inference.model import Applied, load_model
from hvfreeze.model.hugging_face import find_library, processor_of, save
from hvfreeze.model.modes import in_evaluation
from hvfreeze.model.weights import read_weights
from hvfreeze.runs.files import publish, reason_of
from hvfreeze.runs.reading import printable
from hvfreeze.wording import plural, reason_in_a_line

INPUT = "pixels"
OUTPUTS = {"classes": "logits", "labels": "logits", "numbers": "numbers"}
"""Name of the output in a file, by task."""
IMAGES = 16
"""Number of images for checking a file."""
WORST = 1e-2
"""Largest accepted difference as a share of the largest output; rounding gives 1e-6 to 1e-4."""
OTHER_OUT = "choose another --out"
Run = Callable[[Tensor], Tensor]
"""Function from pixels to outputs that runs a file."""


class Format(NamedTuple):
    """A kind of file."""

    suffix: str
    """Suffix of the file; empty for a folder."""
    libraries: tuple[str, ...]
    write: Callable[[FromPixels, Path, Tensor, Mapping[str, str]], Run]
    """Writes the file and returns the function that runs it."""


class FromPixels(nn.Module):
    """A model with its normalization: (batch, 3, H, W) uint8 pixels to (batch, outputs) float32."""

    def __init__(self, applied: Applied) -> None:
        super().__init__()
        self.model = applied.model
        self.normalised = applied.preparation.normalised
        self.unit, self.offset = (torch.tensor(each) for each in (applied.card.unit, applied.card.offset))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the answers, numbers in the user's units."""
        found: Tensor = self.model(self.normalised(pixels)).float()
        return self.unit * found + self.offset if len(self.unit) else found


def export(run_dir: Path, *, form: str, out: Path | None = None, name: str = "model", trust_code: bool = False) -> int:
    """Write a finished run's model to the file `out`, compare its outputs with the model's, and return 0.

    The default of `out` is NAME.onnx, NAME.pt2, NAME.safetensors or the folder `transformers` in the run directory.

    Raises:
        UsageError: a library is missing, or the model reads text.
        RefusedError: there is no finished model, it cannot be written in this format, or the outputs of the file
            differ.
    """
    kind = FORMATS[form]
    for library in kind.libraries:
        try:
            import_module(library)
        except ImportError as error:
            raise UsageError(
                f"--format ({form}) needs other libraries ({error}): pip install {' '.join(kind.libraries)}"
            ) from error
    applied = load_model(run_dir, name=name, trust_code=trust_code)
    path = out or run_dir / (f"{name}{kind.suffix}" if kind.suffix else form)
    if not kind.suffix and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"--out ({path}) must be a new or an empty folder with --format {form}")
    if kind.suffix and path.suffix != kind.suffix:
        raise UsageError(f"--out ({path}) must end in {kind.suffix} with --format {form}")
    pixels, what = pixels_to_check(applied, run_dir, trust_code=trust_code)
    module = FromPixels(applied)
    with torch.no_grad(), in_evaluation(module):
        wanted = module(pixels)
        run = kind.write(module, path, pixels, facts(applied))
        largest = worst_difference(run, pixels, wanted)
    scale = float(wanted.abs().max())
    if not largest <= WORST * max(scale, 1e-6):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise RefusedError(
            f"{path} was removed: on {what} its outputs differ by up to {largest:.2g} (largest output "
            f"{scale:.2g}); use another --format"
        )
    print(printable(f"{path}: {card_line(applied)}"))
    print(f"checked on {what}: largest difference {largest:.2g}, largest output {scale:.2g}")
    return 0


def worst_difference(run: Run, pixels: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of a file's outputs, for all images together and for the first one alone."""
    found = [(run(pixels), wanted), (run(pixels[:1]), wanted[:1])]
    return max(float((answers - right).abs().max()) for answers, right in found)


def pixels_to_check(applied: Applied, run_dir: Path, *, trust_code: bool) -> tuple[Tensor, str]:
    """Return (N, 3, H, W) uint8 pixels of the run's evaluation images, else random ones, and a description."""
    preparation = applied.preparation
    with suppress(HvfreezeError):
        samples = own_samples(applied, run_dir, trust_code=trust_code)
        pixels = list[Tensor]()
        for row in range(len(samples.labels)):
            with suppress(HvfreezeError):
                pixels.append(torch.from_numpy(samples.decode(row)))
            if len(pixels) == IMAGES:
                break
        if len(pixels) > 1:
            return torch.stack(pixels), f"{plural(len(pixels), 'image')} of the run"
    draws = torch.Generator().manual_seed(0)
    shape = (IMAGES, 3, preparation.height, preparation.width)
    random = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws)
    return random, f"{IMAGES} random images, because the run's images cannot be read"


def facts(applied: Applied) -> dict[str, str]:
    """Return the facts about a model that an exported file records, as texts."""
    card, preparation = applied.card, applied.preparation
    return {
        "classes": json.dumps(list(applied.classes)),
        "preparation": json.dumps(asdict(preparation)),
        "task": card.task,
        "thresholds": json.dumps(list(card.thresholds)),
        "unit": json.dumps(list(card.unit)),
        "offset": json.dumps(list(card.offset)),
        "model": card.model,
        "head": card.head,
        "accuracy": json.dumps(card.accuracy),
        "parameter_digest": card.parameter_digest,
        "hvfreeze": __version__,
    }


def card_line(applied: Applied) -> str:
    """Return the description of a file for a log line."""
    preparation: Preparation = applied.preparation
    answers = plural(len(applied.classes), *applied.card.answers.nouns)
    return f"{applied.card.model}, {answers}, images of {preparation.width}x{preparation.height} pixels"


def write_onnx(module: FromPixels, path: Path, pixels: Tensor, facts: Mapping[str, str]) -> Run:
    """Write an ONNX file with a dynamic batch axis."""
    with exporting(module, "ONNX"):
        program: Any = torch.onnx.export(
            module,
            (pixels[:2],),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUTS[facts["task"]]],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
        proto = program.model_proto
        for key, value in facts.items():
            proto.metadata_props.add(key=key, value=value)
        data = proto.SerializeToString()
    publish(path, [data], otherwise=OTHER_OUT)
    runtime: Any = import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda some: torch.from_numpy(session.run(None, {INPUT: some.numpy()})[0])


def write_torch(module: nn.Module, path: Path, pixels: Tensor, facts: Mapping[str, str]) -> Run:
    """Write a file for `torch.export.load(path).module()`, with a dynamic batch axis."""
    with exporting(module, "a torch.export program"):
        dynamic = ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(module, (pixels[:2],), dynamic_shapes=dynamic)
        # Into memory first: torch ends the process if it cannot write to the disk.
        whole = io.BytesIO()
        torch.export.save(program, whole, extra_files={"facts.json": json.dumps(dict(facts))})
        publish(path, [whole.getbuffer()], otherwise=OTHER_OUT)
        read: Run = torch.export.load(path).module()
    return read


def write_safetensors(module: FromPixels, path: Path, pixels: Tensor, facts: Mapping[str, str]) -> Run:
    """Write the state_dict of the model; numbers are in the user's units after unit * output + offset."""
    library: Any = import_module("safetensors.torch")
    state = {name: tensor.detach().clone().contiguous() for name, tensor in module.model.state_dict().items()}
    publish(path, [library.save(state, metadata=dict(facts))], otherwise=OTHER_OUT)
    # Into the same module: another one would be built in the same way.
    module.model.load_state_dict(read_weights(str(path)))
    return module


CARD = """---
library_name: transformers
pipeline_tag: image-classification
---

{what}. Test accuracy: {accuracy}. Parameter digest: {parameter_digest}. Trained by hvfreeze {hvfreeze}.
"""
PROBLEMS = {"classes": "single_label_classification", "labels": "multi_label_classification"}
"""Problem types of transformers, by task."""


def write_transformers(module: FromPixels, path: Path, pixels: Tensor, facts: Mapping[str, str]) -> Run:
    """Write a folder for `from_pretrained` of transformers; `thresholds` of labels are in its config."""
    model: Any = module.model
    if facts["task"] not in PROBLEMS:
        raise UsageError("--format (transformers) cannot store the units of numbers; use onnx or torch")
    classes, prepared = [printable(name) for name in json.loads(facts["classes"])], json.loads(facts["preparation"])
    if prepared["fit"] == "pad":
        raise UsageError("--format (transformers) cannot pad images, and the run has --fit pad; use onnx or torch")
    side = prepared["cropped_to"]
    processor = processor_of(
        side=prepared["enlarged_to"] or side or prepared["height"],
        resize=prepared["height"] if side else None,
        fit=prepared["fit"],
        resample=prepared["resample"],
        mean=tuple(prepared["mean"]),
        std=tuple(prepared["std"]),
    )
    if hasattr(model, "config"):
        model.config.problem_type = PROBLEMS[facts["task"]]
        if facts["task"] == "labels":
            model.config.update({"thresholds": json.loads(facts["thresholds"])})
    text = CARD.format(what=f"{facts['model']} for {', '.join(classes)}", **facts)
    with new_folder(path) as folder:
        save(model, folder, classes=classes, processor=processor)
        (folder / "README.md").write_text(text, encoding="utf-8")
    again: Any = find_library().AutoModelForImageClassification.from_pretrained(path)
    again.eval()

    def run(some: Tensor) -> Tensor:
        found: Tensor = again(module.normalised(some)).logits
        return found.float()

    return run


FORMATS = {
    "transformers": Format("", ("transformers",), write_transformers),
    "onnx": Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx),
    "torch": Format(".pt2", (), write_torch),
    "safetensors": Format(".safetensors", ("safetensors",), write_safetensors),
}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `path`, which may be an empty one, if the block succeeds.

    Raises:
        RefusedError: the folder cannot be written; nothing is left of it.
    """
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(path)
    except HvfreezeError:
        raise
    except Exception as error:  # the library raises its own errors on a full disk
        raise RefusedError(f"{path} cannot be written ({reason_of(error)}); free some space or {OTHER_OUT}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def exporting(module: nn.Module, what: str) -> Iterator[None]:
    """Suppress the warnings of torch's exporters, and convert their errors to RefusedError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HvfreezeError:
        raise
    except Exception as error:
        name = type(getattr(module, "model", module)).__name__
        raise RefusedError(f"{name} cannot be exported as {what}: {reason_in_a_line(error)}") from error
