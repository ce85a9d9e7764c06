"""Every rank has modules of one model on a ring; the model must be the twin's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvfreeze.comm.world import World
from hvfreeze.config.tree import Config
from hvfreeze.model.blocks import Chain
from hvfreeze.model.model_sources import BuiltModel
from hvfreeze.model.tiny_lm import EMBEDDING, WIDTH, TinyLM
from hvfreeze.training import blueprint
from hvfreeze.training.run import run
from tests.parallel.twins.stale_ring import StaleRing
from tests.parallel.workers import checking
from tests.parallel.workers.checking import as_runs_lay_out, batches_of, differing, let_runs_build, small_resnet
from tests.parallel.workers.runs import lines, see_that_stopped_runs_go_on

BATCH, CONTEXT, STEPS, EPOCHS, LAYERS = 4, 8, 4, 2, 3
STALE_AFTER = 2
WEIGHT_DECAY = 1e-2
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=WEIGHT_DECAY),
    ),
    "adam": (
        {"optimizer": "adamw", "lr": 3e-3},
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=WEIGHT_DECAY),
    ),
}
RESNET = as_runs_lay_out(small_resnet)
UNTIED = {"model": "resnet20", "data": "digits", "image_size": 16, "blocks": "residual"}
UNTIED |= {"context": None, "data_dir": None}
"""Runs whose model has no parameter that both ends use."""


class WithDropout(TinyLM):
    """A language model in which every module but the first draws random numbers."""

    def __init__(self, characters: int, *, context: int) -> None:
        super().__init__(characters, context=context, layers=LAYERS)
        self.layers = nn.Sequential(*[nn.Sequential(layer, nn.Dropout(0.2)) for layer in self.layers])


def let_runs_build_lm(make: Callable[..., TinyLM]) -> None:
    """Let every run of this process train a language model of few layers."""

    def build(*args: Any, num_classes: int, image_size: int, **kwargs: Any) -> BuiltModel:
        model = make(num_classes, context=image_size)
        parts = [("stem", model.embedding), *model.layers.named_children(), ("head", [model.norm, model.output])]
        return BuiltModel(model, [], Chain.from_modules(model, parts, tied=[EMBEDDING]))

    blueprint.build_model = build  # type: ignore[assignment]


def small_lm(characters: int, *, context: int) -> TinyLM:
    return TinyLM(characters, context=context, layers=LAYERS)


class Trial(checking.Trial):
    """Runs of a small language model; see `checking.Trial`."""

    def __init__(self, world: World, root: Path) -> None:
        self.world, self.root = world, root
        self.alone = world.among([0])
        self.text = root / "text.txt"
        if world.rank == 0:
            self.text.write_text("".join(f"def f{n % 10}(x):\n    return x + {n * n % 97}\n\n" for n in range(120)))
        world.barrier(name="test.text")
        let_runs_build_lm(small_lm)

    def config(self, name: str, **changes: Any) -> Config:
        base = {
            "strategy": "stale-ring",
            "data_dir": str(self.text),
            "context": CONTEXT,
            "augment": "none",
            "train_samples": STEPS * BATCH * 5 // 4 + 2,
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "weight_decay": WEIGHT_DECAY,
            "stale_after": STALE_AFTER,
        }
        return super().config(name, **{**base, **changes})

    def follow(self, twin: StaleRing, config: Config) -> dict[str, Tensor]:
        """Train a twin on a run's batches."""
        for epoch in batches_of(config):
            for (batch,) in epoch:
                twin.step(*batch)
        return twin.model.state_dict()


def delays_of(model: nn.Module, blocks: list[tuple[str, ...]], segments: list[list[int]]) -> dict[str, int]:
    """K-k of every parameter, by the blocks that modules have; `blocks` are names that parameters begin with."""
    delays = {}
    for part, (start, stop) in enumerate(segments):
        owned = [prefix for block in blocks[start:stop] for prefix in block]
        for name, _ in model.named_parameters():
            if any(name.startswith(prefix) for prefix in owned):
                delays[name] = len(segments) - 1 - part
    assert len(delays) == len(list(model.parameters()))
    return delays


def untied_logits(model: Any, last: Tensor, codes: Tensor) -> Tensor:
    """The language model's answer with its output matrix given."""
    return nn.functional.linear(model.norm(model.layers(model.embedding(codes))), last).transpose(1, 2)


def lm_blocks() -> list[tuple[str, ...]]:
    return [("embedding.",), *[(f"layers.{layer}.",) for layer in range(LAYERS)], ("norm.",)]


def check_the_ring_is_the_twin(trial: Trial) -> None:
    """K = 3 on two ranks, 4 on three; both optimizers, both weightings of shared parameters."""
    for (kind, (flags, open_optimizer)), half in zip(OPTIMIZERS.items(), (False, True)):
        name = f"{kind}-half" if half else kind
        config = trial.config(name, tied_gradient="half" if half else "sum", **flags)
        summary = run(config, trial.world)
        ring, parts = summary["ring"], trial.world.size + 1
        assert ring["parts"] == parts and ring["delays"] == list(range(parts - 1, -1, -1))
        see_what_travelled(summary)
        # A module keeps a batch for each step that its gradient is late.
        late = [sum(ring["delays"][part] for part in range(parts) if part % (parts - 1) == r) for r in range(parts - 1)]
        assert ring["waiting"] == late
        if trial.world.rank == 0:
            torch.manual_seed(0)
            model = small_lm(trial.model(name)[EMBEDDING].shape[0], context=CONTEXT)
            twin = StaleRing(
                model,
                untied_logits,
                delays=delays_of(model, lm_blocks(), ring["segments"]),
                shared=EMBEDDING,
                half=half,
                stale_after=STALE_AFTER,
                open_optimizer=open_optimizer,
            )
            assert differing(trial.model(name), trial.follow(twin, config)) == [], f"{name}: not the twin"
        trial.world.barrier(name="test.twin")


def see_what_travelled(summary: dict[str, Any]) -> None:
    """Activations and errors of the ring's boundaries, and no byte more: no labels, no parameters."""
    ring, steps = summary["ring"], STEPS * EPOCHS
    boundary = 4 * BATCH * CONTEXT * WIDTH
    parts = ring["parts"]
    # A batch whose error is found in the last step is not used any more, but it has been sent.
    errors = sum(sum(1 for step in range(steps) if due(step, delay) is not None) for delay in range(parts - 1))
    expected = {"activations": steps * (parts - 1) * boundary, "errors": errors * boundary}
    assert ring["wire_bytes"] == expected
    assert summary["allreduce_bytes"] == 0
    # Three flags, the loss and a norm.
    assert summary["other_collective_bytes"] == steps * 5 * 8


def due(step: int, delay: int) -> int | None:
    """The batch with which a module that is so many steps late goes back, written once more."""
    if step < STALE_AFTER:
        return step
    return step - delay if step - delay >= STALE_AFTER else None


def check_a_model_whose_ends_share_nothing_is_the_twin_and_goes_on(trial: Trial) -> None:
    """With BatchNorm: statistics follow forward passes, and are seen once where batches under way are computed anew."""
    if trial.world.size != 2:
        return
    let_runs_build(small_resnet)
    flags, open_optimizer = OPTIMIZERS["sgd"]
    configure = partial(trial.config, **UNTIED, **flags)
    summary = see_that_stopped_runs_go_on(configure, trial.world, [STALE_AFTER + 1], part="ring")
    if trial.world.rank == 0:
        torch.manual_seed(0)
        model = RESNET(10)
        blocks = [("conv1.", "bn1."), ("layer1.",), ("layer2.",), ("layer3.",), ("fc.",)]
        twin = StaleRing(
            model,
            lambda copy, _, images: copy(images),
            delays=delays_of(model, blocks, summary["ring"]["segments"]),
            shared=None,
            half=False,
            stale_after=STALE_AFTER,
            open_optimizer=open_optimizer,
        )
        found, expected = trial.model("straight"), trial.follow(twin, configure("data"))
        assert differing(found, expected) == [], "not the twin"
        said = (trial.root / "straight" / "log.txt").read_text()
        assert "the ring only keeps the labels" in said
    let_runs_build_lm(small_lm)
    trial.world.barrier(name="test.untied")


def check_without_staleness_it_is_plain_backpropagation(trial: Trial) -> None:
    if trial.world.size != 2:
        return
    flags, _ = OPTIMIZERS["adam"]
    given = {**flags, "stale_after": 10**6}
    summary = run(trial.config("new", **given), trial.world)
    ring = summary["ring"]
    assert ring["waiting"] == ring["stash_bytes"] == [0] * trial.world.size
    if trial.alone is not None:
        changed = {"strategy": "replicas", "model": "tiny-lm", "data": "text", "stale_after": None}
        run(trial.config("plain", **{**given, **changed}), trial.alone)
        assert differing(trial.model("new"), trial.model("plain")) == []
        for mine, theirs in zip(
            lines(trial.root / "new", "metrics"), lines(trial.root / "plain", "metrics"), strict=True
        ):
            for key in ("train_loss", "test_loss", "test_bits_per_character"):
                assert mine[key] == theirs[key], key
    trial.world.barrier(name="test.new")


def check_a_stopped_run_goes_on_bit_for_bit(trial: Trial) -> None:
    """In the warm-up, where the first modules have no gradient as yet, and in the middle of a full pipeline."""
    let_runs_build_lm(WithDropout)
    given = {"epochs": 3, "schedule": "cosine", "clip_grad": 1.0, "lr": 3e-3, "tied_gradient": "half"}
    stops = [STALE_AFTER + 1, STEPS + 3]
    see_that_stopped_runs_go_on(partial(trial.config, **given), trial.world, stops, part="ring")
    let_runs_build_lm(small_lm)


setting = Trial
