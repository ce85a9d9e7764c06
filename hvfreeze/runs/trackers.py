"""Experiment trackers that rank 0 reports to: TensorBoard, MLflow, Weights & Biases.

Each has a thread, so that one that is slow, hangs or fails never stops a run. Nothing leaves the machine unless the
tracker's own environment variables name a server.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hvfreeze.config.run import TRACKERS
from hvfreeze.errors import UsageError
from hvfreeze.imports import import_whole
from hvfreeze.runs.files import publish

SECONDS_TO_END, SECONDS_AFTER_ERROR = 30.0, 5.0
"""How long the end of a run waits for its trackers, and that of a run that failed, for which other ranks wait."""
IDS = "trackers.json"
"""The file in a run directory with the trackers' own names of the run, by which a resumed run continues them."""
LONGEST_VALUE = 500
"""Characters of a setting's value."""
Numbers = Mapping[str, float]


class Tracker(Protocol):
    """A run in a tracker. All methods may fail in any way."""

    identity: str
    """The tracker's own name of the run, empty where it has none."""

    def numbers(self, numbers: Numbers, *, step: int) -> None:
        """Add numbers of an optimizer step."""

    def text(self, name: str, text: str, *, step: int) -> None:
        """Add a text."""

    def finish(self, summary: Numbers, files: Sequence[Path]) -> None:
        """Add the numbers and the files of a finished run; images are shown."""

    def close(self, *, failed: bool) -> None:
        """End the run in the tracker."""


class TensorBoard:
    """Event files in `tensorboard/` of the run directory. A resumed run hides what was drawn after its checkpoint."""

    identity = ""

    def __init__(self, directory: Path, settings: Mapping[str, str], *, identity: str, step: int) -> None:
        writer = import_whole("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(directory / "tensorboard"), purge_step=step + 1 if step else None)
        self.text("settings", "  \n".join(f"{name}: {value}" for name, value in settings.items()), step=step)

    def numbers(self, numbers: Numbers, *, step: int) -> None:
        """Draw each number under its name."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def text(self, name: str, text: str, *, step: int) -> None:
        """Add a text."""
        self._writer.add_text(name, text, global_step=step)

    def finish(self, summary: Numbers, files: Sequence[Path]) -> None:
        """Add a table of the numbers, and the images."""
        rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in summary.items())
        self.text("summary", f"| name | value |\n|---|---|\n{rows}", step=0)
        for path in files:
            if path.suffix == ".png":
                pixels = import_whole("matplotlib.image").imread(path)
                self._writer.add_image(path.stem, pixels, dataformats="HWC")

    def close(self, *, failed: bool) -> None:
        """Close the files."""
        self._writer.close()


class MLflow:
    """A run in the store of `MLFLOW_TRACKING_URI`; without it in `mlflow.db` next to the run directory."""

    def __init__(self, directory: Path, settings: Mapping[str, str], *, identity: str, step: int) -> None:
        self._mlflow: Any = import_whole("mlflow")
        store = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            store = f"sqlite:///{directory.parent / 'mlflow.db'}"
        client = self._mlflow.MlflowClient(tracking_uri=store)
        self._client: Any = client
        if not identity:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvfreeze")
            found = client.get_experiment_by_name(name)
            place = None if store is None else (directory.parent / "mlflow").absolute().as_uri()
            experiment = found.experiment_id if found else client.create_experiment(name, artifact_location=place)
            identity = client.create_run(experiment, run_name=directory.name).info.run_id
            for key, value in settings.items():
                client.log_param(identity, key, value)
        else:
            client.update_run(identity, status="RUNNING")
        self.identity = identity

    def numbers(self, numbers: Numbers, *, step: int) -> None:
        """Add the numbers as metrics."""
        entities, now = self._mlflow.entities, int(time.time() * 1000)
        metrics = [entities.Metric(name.replace("=", "-"), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def text(self, name: str, text: str, *, step: int) -> None:
        """Keep the text as a tag."""
        self._client.set_tag(self.identity, f"{name}.{step}", text)

    def finish(self, summary: Numbers, files: Sequence[Path]) -> None:
        """Add the numbers as metrics, and the files as artifacts."""
        self.numbers({f"summary/{name}": value for name, value in summary.items()}, step=0)
        for path in files:
            self._client.log_artifact(self.identity, str(path))

    def close(self, *, failed: bool) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


class WeightsAndBiases:
    """A run in `wandb/` next to the run directory, offline unless `WANDB_MODE` says otherwise."""

    def __init__(self, directory: Path, settings: Mapping[str, str], *, identity: str, step: int) -> None:
        wandb: Any = import_whole("wandb")
        self._wandb = wandb
        mode = None if os.environ.get("WANDB_MODE") else "offline"
        project = None if os.environ.get("WANDB_PROJECT") else "hvfreeze"
        quiet = wandb.Settings(silent=True, console="off")
        self._run: Any = wandb.init(
            project=project,
            name=directory.name,
            id=identity or None,
            resume="allow" if identity else None,
            dir=str(directory.parent),
            config=dict(settings),
            mode=mode,
            settings=quiet,
        )
        self.identity = str(self._run.id)

    def numbers(self, numbers: Numbers, *, step: int) -> None:
        """Add the numbers."""
        self._run.log(dict(numbers), step=step)

    def text(self, name: str, text: str, *, step: int) -> None:
        """Add the text."""
        self._run.log({name: self._wandb.Html(f"<pre>{text}</pre>")}, step=step)

    def finish(self, summary: Numbers, files: Sequence[Path]) -> None:
        """Add the numbers to the summary; images are shown, other files kept."""
        self._run.summary.update(dict(summary))
        for path in files:
            if path.suffix == ".png":
                self._run.log({path.stem: self._wandb.Image(str(path))})
            else:
                self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))


KINDS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
assert tuple(KINDS) == TRACKERS


def check_trackers(names: Sequence[str]) -> None:
    """Raise UsageError where the library of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(
                f"--track ({name}) needs the library {name}, which is not installed: pip install {name}, or leave it "
                "out; `hvfreeze report --watch` follows a run without it"
            )


class Reporter:
    """A tracker in a separate thread; after an error it is not used any more.

    Args:
        name: of the tracker.
        begin: opens it, in that thread.
        say: logs a line.
    """

    def __init__(self, name: str, begin: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self._name, self._begin, self._say = name, begin, say
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._error = ""
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[Tracker], None]) -> None:
        """Queue a call of the tracker."""
        self._waiting.put(work)

    def end(self, seconds: float) -> None:
        """Wait until all is done, at most so many seconds; log what went wrong."""
        self._waiting.put(None)
        self._thread.join(seconds)
        error = f"it did not end within {seconds:.0f} s" if self._thread.is_alive() else self._error
        if error:
            self._say(f"warning: tracking with {self._name} is incomplete: {error}; the files of the run are complete")

    def _work(self) -> None:
        try:
            tracker = self._begin()
            while (work := self._waiting.get()) is not None:
                work(tracker)
        except (Exception, SystemExit) as error:  # a tracker may fail in any way
            self._error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_VALUE]


class Trackers:
    """All trackers of a run; none on ranks but 0."""

    def __init__(self, reporters: Sequence[Reporter] = ()) -> None:
        self._reporters = list(reporters)
        self._failed = True

    def line(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl, each number under its own name, those of phases, verbs and models in groups."""
        if not self._reporters:
            return
        numbers, step = flattened(line), int(line["step"])
        if "verb" in line:
            numbers = {f"{line['verb']}/{name}": value for name, value in numbers.items()}
        self._give(lambda tracker: tracker.numbers(numbers, step=step))

    def rate(self, rate: float, *, step: int) -> None:
        """Add the learning rate of a step."""
        self._give(lambda tracker: tracker.numbers({"learning_rate": rate}, step=step))

    def decision(self, decision: Mapping[str, Any]) -> None:
        """Add a line of decisions.jsonl."""
        if not self._reporters:
            return
        step, cut = int(decision["step"]), float(decision["cut_after"])
        text = f"cut {decision['cut_before']} -> {decision['cut_after']}: {decision['reason']}"
        self._give(lambda tracker: tracker.numbers({"vote/cut": cut}, step=step))
        self._give(lambda tracker: tracker.text("vote", text, step=step))

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Add a finished run's numbers and files."""
        numbers = flattened(summary)
        self._give(lambda tracker: tracker.finish(numbers, files))
        self._failed = False

    def close(self) -> None:
        """End the run in all trackers."""
        failed = self._failed
        end = time.monotonic() + (SECONDS_AFTER_ERROR if failed else SECONDS_TO_END)
        self._give(lambda tracker: tracker.close(failed=failed))
        for reporter in self._reporters:
            reporter.end(max(1.0, end - time.monotonic()))
        self._reporters = []

    def _give(self, work: Callable[[Tracker], None]) -> None:
        for reporter in self._reporters:
            reporter.give(work)


def open_trackers(
    names: Sequence[str],
    directory: Path,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    step: int,
    say: Callable[[str], None],
) -> Trackers:
    """Return the trackers of a run, which are opened in their threads.

    Args:
        names: keys of `KINDS`.
        directory: the run directory.
        settings: the configuration by section.
        step: optimizer steps that a resumed run has made.
        say: logs a line.
    """
    plain = {
        f"{section}.{leaf}": str(value)[:LONGEST_VALUE]
        for section, each in settings.items()
        for leaf, value in each.items()
    }
    known, writing = ids_in(directory), threading.Lock()

    def begin(name: str) -> Tracker:
        tracker = KINDS[name](directory.absolute(), plain, identity=known.get(name, ""), step=step)
        with writing:
            if tracker.identity and tracker.identity != known.get(name):
                known[name] = tracker.identity
                publish(directory / IDS, [json.dumps(known).encode()])
        return tracker

    return Trackers([Reporter(name, lambda name=name: begin(name), say) for name in names])  # type: ignore[misc]


def ids_in(directory: Path) -> dict[str, str]:
    """Return the trackers' names of the run in a directory; none where they cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads((directory / IDS).read_bytes())
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
    return {}


def flattened(line: Mapping[str, Any], *, within: str = "") -> dict[str, float]:
    """Return the numbers in nested mappings, named by the way to them."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= flattened(value, within=f"{within}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ("step", "epoch"):
            found[f"{within}{key}"] = float(value)
    return found
