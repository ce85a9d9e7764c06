"""Every rank wraps optimizers as a training script does, and compares with a loop that averages by hand."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import SoloWorld, World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.integration.script_world import RunningWorld, script_world

STEPS = 4


def start() -> World:
    """Open the world of a script that has started Horovod itself."""
    import horovod.torch as hvd

    hvd.init()
    world = script_world()
    assert type(world) is RunningWorld and (world.size, world.rank) == (hvd.size(), hvd.rank())
    return world


def note_what_is_told(lines: list[str]) -> None:
    """Add to `lines`, and to no others, what hvfreeze logs from now on."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvfreeze").handlers = [handler]
    logging.getLogger("hvfreeze").setLevel(logging.INFO)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, **options: Any) -> DistributedOptimizer:
    given: dict[str, Any] = {"settings": FreezeConfig(), "steps_per_epoch": STEPS, "num_epochs": 3, **options}
    return DistributedOptimizer(optimizer, model.named_parameters(), model=model, world=world, **given)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, weight_decay=1e-2),
}


def image_model() -> nn.Sequential:
    torch.manual_seed(0)
    # No bias before a BatchNorm: its gradient is nothing but rounding, which Adam would make a step of.
    first = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    body = [first, nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 3)]
    return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5))


def batches(rank: int, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)  # dropout
    for _ in range(steps):
        yield torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_alike(world: World, ours: nn.Module, theirs: nn.Module) -> None:
    """One rank gives the same bits; of several, sums in another order may round differently."""
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        if world.size == 1:
            assert torch.equal(mine, reference)
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4)


def raises(kind: type[Exception], words: str, work: Callable[[], object]) -> None:
    try:
        work()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nobody said '{words}'")


def abandon(optimizer: DistributedOptimizer) -> None:
    """Wait for pending messages, so that their names are free for the next optimizer."""
    vars(optimizer.reducer)["_check_untouched"] = lambda bucket: None  # it would report the error again
    optimizer.reducer.finish()


def average_by_hand(model: nn.Module, world: World) -> None:
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            parameter.grad = world.allreduce_sum(parameter.grad / world.size, name=f"test.hand.{number}")


def check_what_would_lose_gradients_is_refused(world: World) -> None:
    model = image_model()
    optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()), world)
    images, labels = next(batches(world.rank))
    functional.cross_entropy(model(images), labels).backward()
    raises(UsageError, "zero_grad() must not be called between backward() and step()", optimizer.zero_grad)
    optimizer.step()
    functional.cross_entropy(model(images), labels).backward()
    with optimizer.skip_synchronize():
        raises(UsageError, "must follow synchronize()", optimizer.step)
    optimizer.step()
    changes: list[Callable[[nn.Module], object]] = [
        lambda one: nn.utils.clip_grad_norm_(one.parameters(), 0.5),
        nn.Module.zero_grad,
        lambda one: setattr(one[5].bias, "grad", torch.ones(5)),  # type: ignore[index]
    ]
    for change in changes:
        model = image_model()
        optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()), world)
        functional.cross_entropy(model(images), labels).backward()
        change(model)
        raises(UsageError, "call synchronize() before you clip", optimizer.step)
        abandon(optimizer)


def check_unequal_ranks_are_refused(world: World) -> None:
    model = image_model()
    last = world.rank == world.size - 1
    wrong = {"steps_per_epoch": 3 if last else 4}
    sgd = OPTIMIZERS["sgd"](model.parameters())
    raises(UsageError, "steps_per_epoch is 4 on rank 0 and 3 on rank", lambda: wrap(model, sgd, world, **wrong))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 if last else 2))
    sgd = OPTIMIZERS["sgd"](other.parameters())
    raises(UsageError, "1.bias is 'float32 [2]' on rank 0 and 'float32 [3]' on", lambda: wrap(other, sgd, world))
    raises(UsageError, "LBFGS", lambda: wrap(model, torch.optim.LBFGS(model.parameters()), world))


class Text(nn.Module):
    """Two inputs, a loose parameter, shared dropout, glue between its parts: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.embedding = nn.Embedding(20, 8)
        self.position = nn.Parameter(torch.zeros(1, 6, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.position)
        for layer in self.layers:
            x = x + self.dropout(layer(x).relu())
        logits: Tensor = self.head((x * mask[..., None]).mean(1))
        return logits


def text_training(
    world: World, *, seed: int = 0, told: bool = True, **settings: Any
) -> tuple[Text, DistributedOptimizer, Callable[[int], None]]:
    """Return a model, its optimizer and its training step; with `told`, the optimizer gets an example of the inputs."""
    torch.manual_seed(seed)
    model = Text()
    example = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "mask": torch.ones(2, 6)} if told else None
    options = {"interval": 2, "freeze_warmup": 4, "eta_max": math.inf, **settings}
    config = FreezeConfig(freeze="gradient-norm", **options)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = wrap(model, adamw, world, settings=config, num_epochs=20, example=example)
    generator = torch.Generator()

    def train(steps: int) -> None:
        for _ in range(steps):
            generator.manual_seed(100 * optimizer.freezer.step + world.rank)
            torch.manual_seed(optimizer.freezer.step)
            tokens = torch.randint(0, 20, (8, 6), generator=generator)
            loss = functional.cross_entropy(model(tokens, (tokens > 0).float()), tokens.sum(1) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.report_loss(loss.item())
            optimizer.step()

    return model, optimizer, train


def hooks_on(model: nn.Module) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def check_a_model_with_several_inputs_freezes_by_vote(world: World) -> None:
    """Also where its blocks are found in the first pass of training, after one that only looks."""
    for told in (True, False):
        lines: list[str] = []
        note_what_is_told(lines)
        model, optimizer, train = text_training(world, told=told, vote_weight="loss")
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6))
        model.train()
        assert len(optimizer.freezer.chain.blocks) == (5 if told else 1)
        train(1)
        names = [block.name for block in optimizer.freezer.chain.blocks]
        assert names == ["embedding", "layers.0", "layers.1", "layers.2", "head"], names
        assert "position" in optimizer.freezer.chain.blocks[1].parameter_names
        assert hooks_on(model) == 0, "hooks stay on the model"
    train(19)
    assert optimizer.freezer.cut > 0, "twenty steps without a single frozen block"
    assert any("frozen: embedding" in line for line in lines) == (world.rank == 0)
    check_replicas(model, world, step=20)


def check_a_resumed_script_is_the_uninterrupted_one(world: World) -> None:
    model, optimizer, train = text_training(world, told=False)
    train(19)
    saved = copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "freezer": optimizer.freezer_state_dict()}
    )
    plain = torch.optim.AdamW(Text().parameters(), lr=1e-2)
    plain.load_state_dict(saved["optimizer"])  # as without hvfreeze
    frozen = optimizer.freezer.cut
    assert frozen > 0
    train(6)
    for told, order in ((False, ("model", "optimizer", "freezer")), (True, ("freezer", "optimizer", "model"))):
        again, resumed, advance = text_training(world, seed=1, told=told)
        load = {
            "model": again.load_state_dict,
            "optimizer": resumed.load_state_dict,
            "freezer": resumed.load_freezer_state_dict,
        }
        for part in order:
            load[part](copy.deepcopy(saved[part]))
        assert resumed.freezer.cut == frozen and hooks_on(again) == 0, "the state has the blocks"
        advance(6)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        assert resumed.freezer.cut_history == optimizer.freezer.cut_history
    # Rank 0's alone, as scripts save it.
    again, resumed, advance = text_training(world)
    everyone = world.broadcast_object(saved, name="test.checkpoint")
    again.load_state_dict(everyone["model"])
    resumed.load_state_dict(everyone["optimizer"])
    resumed.load_freezer_state_dict(everyone["freezer"])
    advance(2)
    assert resumed.freezer.cut >= frozen
    check_replicas(again, world, step=21)


def train_by_hand(model: nn.Module, optimizer: Any, world: World, schedule: Any, order: str, to_none: bool) -> None:
    for images, labels in batches(world.rank):
        loss = functional.cross_entropy(model(images), labels)
        if order == "between":
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        average_by_hand(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if order == "after":
            optimizer.zero_grad(set_to_none=to_none)


def train_wrapped(model: nn.Module, optimizer: Any, world: World, schedule: Any, order: str, to_none: bool) -> None:
    for images, labels in batches(world.rank):
        if order == "before":
            optimizer.zero_grad(set_to_none=to_none)
        loss = functional.cross_entropy(model(images), labels)
        if order == "between":
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        if order in ("after", "by the model"):
            (optimizer if order == "after" else model).zero_grad(set_to_none=to_none)


def check_every_optimizer_order_and_schedule_is_plain_training(world: World) -> None:
    for ranks in (world, SoloWorld()):
        compare_with_plain_training(ranks)


def compare_with_plain_training(world: World) -> None:
    orders = [("before", "after"), ("between", "between"), ("after", "after"), ("by the model", "after")]
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        order, reference_order = orders[number]
        for to_none in (True, False) if name == "sgd" else (number % 2 == 0,):
            ours, theirs = image_model(), image_model()
            plain, wrapped = make(theirs.parameters()), wrap(ours, make(ours.parameters()), world)
            schedules = [
                torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.05, total_steps=STEPS + 1) for one in (plain, wrapped)
            ]
            train_by_hand(theirs, plain, world, schedules[0], reference_order, to_none)
            train_wrapped(ours, wrapped, world, schedules[1], order, to_none)
            assert_alike(world, ours, theirs)
            wrapped.freezer.average_statistics()
            check_replicas(ours, world, step=STEPS)
            assert wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"], name


def check_frozen_blocks_rest_under_every_optimizer(world: World) -> None:
    for make in OPTIMIZERS.values():
        model = image_model()
        model[1].bias.requires_grad_(False)  # the user's own
        model[2].bias.requires_grad_(False)
        optimizer = wrap(model, make(model.parameters()), world)
        for images, labels in batches(world.rank, 2):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        optimizer.freezer.freeze(2)
        before, own = [t.clone() for t in model[:2].state_dict().values()], model[2].bias.clone()
        for images, labels in batches(world.rank, 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model[:2].state_dict().values(), strict=True))
        assert torch.equal(own, model[2].bias)
        optimizer.freezer.thaw(0)
        assert not model[1].bias.requires_grad and model[1].weight.requires_grad


def check_passes_add_up_and_the_last_may_be_fewer(world: World) -> None:
    ours, theirs = image_model(), image_model()
    plain = OPTIMIZERS["sgd"](theirs.parameters())
    wrapped = wrap(ours, OPTIMIZERS["sgd"](ours.parameters()), world, backward_passes_per_step=2)
    for first in (0, 2, 3):
        for model, optimizer in ((theirs, plain), (ours, wrapped)):
            optimizer.zero_grad()
            for number, (images, labels) in enumerate(batches(world.rank)):
                if first <= number < first + 2:
                    functional.cross_entropy(model(images), labels).backward()
            if model is theirs:
                average_by_hand(theirs, world)
            optimizer.step()
    assert_alike(world, ours, theirs)
    (images, labels) = next(batches(world.rank))

    def again() -> None:
        for _ in range(3):
            functional.cross_entropy(ours(images), labels).backward()

    raises(UsageError, "backward_passes_per_step=N", again)
    abandon(wrapped)


def check_horovods_broadcast_creates_state_and_moves_nothing(world: World) -> None:
    import horovod.torch as hvd

    model = image_model()
    before = parameters(model)
    optimizer = wrap(model, OPTIMIZERS["adamw"](model.parameters()), world, compression=hvd.Compression.fp16)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "weights moved"
    assert optimizer.freezer.step == 0 and optimizer.reducer.compression == "fp16"
    images, labels = next(batches(world.rank))
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}, "the state did not start afresh"


def check_a_state_without_frozen_blocks_is_broadcast_by_the_rank_that_has_loaded_it(world: World) -> None:
    import horovod.torch as hvd

    model = image_model()
    optimizer = wrap(model, OPTIMIZERS["adamw"](model.parameters()), world)
    optimizer.freezer.freeze(2)
    train_wrapped_on(model, optimizer, world)
    optimizer.freezer.thaw(1)
    lacking = len(optimizer.param_groups[0]["params"]) - len(optimizer.state)
    assert lacking > 0
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.freezer_state_dict()))
    for frozen in (True, False):
        again = image_model()
        resumed = wrap(again, OPTIMIZERS["adamw"](again.parameters()), world)
        if frozen:
            resumed.load_freezer_state_dict(world.broadcast_object(saved[2], name="test.frozen"))
        if world.rank == 0:
            again.load_state_dict(saved[0])
            resumed.load_state_dict(copy.deepcopy(saved[1]))
        hvd.broadcast_parameters(again.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(resumed, root_rank=0)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
        train_wrapped_on(again, resumed, world)
        steps = [int(state["step"]) for state in resumed.state.values()]
        assert steps.count(2) == len(steps) - steps.count(1), "what rank 0 loaded did not arrive"
        assert steps.count(1) == lacking + (0 if frozen else 3), "what was not there did not start afresh"
        check_replicas(nn.ParameterList(again.parameters()), world, step=1)


def train_wrapped_on(model: nn.Module, optimizer: DistributedOptimizer, world: World) -> None:
    """Make a step."""
    images, labels = next(batches(world.rank))
    optimizer.zero_grad()
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
