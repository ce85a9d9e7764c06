"""Linear probing, then fine-tuning everything from there (Kumar et al., ICLR 2022); the flags of `hvfreeze train`.

    mpirun -n 2 python -m analysis.lp_ft train --data digits --freeze static --cut 5 --lr 0.01 --epochs 2 --run-dir DIR

Two runs of the program itself, in one: the head alone on the prefix that `--freeze static --cut K` names, from its
cache of two views, then all blocks from the weights that this gave, with fresh views, for `--epochs` at `--lr`. The run
directory tells both as one run; the parts lie below it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from analysis.parts.peers import PROBE_EPOCHS, PROBE_VIEWS
from hvfreeze.cli import parse
from hvfreeze.comm.horovod_world import open_world
from hvfreeze.comm.world import end_job_on_exception
from hvfreeze.config.flags import configuration
from hvfreeze.config.tree import Config, to_dict
from hvfreeze.errors import HvfreezeError, UsageError
from hvfreeze.training.run import run

PROGRAM = "linear probing, then fine-tuning"
PROBE_LR = 0.05
SUMS = ("epochs", "steps", "train_seconds", "allreduce_bytes", "other_collective_bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return the exit code. Collective: every rank of the job must call this."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    world = open_world()
    end_job_on_exception(world)
    try:
        config = configuration(parse(given))
        probing, tuning = parts(config)
        first = run(probing, world)
        second = run(tuning, world)
        if world.rank == 0:
            tell_both(config, first, second)
        code = 0
    except HvfreezeError as error:
        if not error.everywhere and world.size > 1:
            world.abort(error.exit_code)
        if world.rank == 0:
            print(f"lp_ft: error: {error}", file=sys.stderr)
        code = error.exit_code
    world.close()
    return code


def parts(config: Config) -> tuple[Config, Config]:
    """Return the two runs' configurations.

    Raises:
        UsageError: the flags ask for what this program does not do.
    """
    if config.freeze.freeze != "static" or config.run.run_dir is None:
        raise UsageError("linear probing needs --freeze static --cut K, the blocks below the head, and --run-dir")
    folder = Path(config.run.run_dir)
    plain = Config()
    probing = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, augment=f"views:{PROBE_VIEWS}"),
        optimizer=dataclasses.replace(config.optimizer, epochs=PROBE_EPOCHS, lr=PROBE_LR),
        cache=dataclasses.replace(config.cache, cache="on"),
        run=dataclasses.replace(
            config.run, run_dir=str(folder / "probe"), evaluate_every=PROBE_EPOCHS, checkpoint_every="0", resume=False
        ),
    )
    tuning = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, weights=str(folder / "probe" / "model.pt")),
        freeze=plain.freeze,
        cache=plain.cache,
        run=dataclasses.replace(config.run, run_dir=str(folder / "tune"), resume=False),
    )
    return probing, tuning


def tell_both(config: Config, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Write what one run directory says of both parts: rank 0 alone."""
    folder = Path(config.run.run_dir or "")
    tree = {**to_dict(config), "program": {"program": PROGRAM}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    environment = (folder / "tune" / "environment.json").read_text(encoding="utf-8")
    (folder / "environment.json").write_text(environment, encoding="utf-8")
    (folder / "decisions.jsonl").touch()
    lines = [*lines_of(folder / "probe"), *later(lines_of(folder / "tune"), after=first)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(joined(first, second), indent=1) + "\n", encoding="utf-8")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a part's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def later(lines: Sequence[Mapping[str, Any]], *, after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return lines whose epochs, steps and bytes count on from a summary's."""
    return [
        {
            **line,
            "epoch": line["epoch"] + after["epochs"],
            "step": line["step"] + after["steps"],
            "allreduce_bytes": line["allreduce_bytes"] + after["allreduce_bytes"],
        }
        for line in lines
    ]


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of both parts as one run."""
    seconds = {phase: value + second["seconds"].get(phase, 0.0) for phase, value in first["seconds"].items()}
    images = sum(part["images_per_second"] * part["train_seconds"] for part in (first, second))
    sums = {name: first[name] + second[name] for name in SUMS}
    moved = [first["epochs"], first["steps"], second["final_cut"]]
    return {
        **second,
        **sums,
        "seconds": seconds,
        "images_per_second": images / max(sums["train_seconds"], 1e-9),
        "cut_history": [*first["cut_history"], moved],
        "cache": first["cache"],
    }


if __name__ == "__main__":
    sys.exit(main())
