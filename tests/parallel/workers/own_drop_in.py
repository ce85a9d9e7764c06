"""Every rank wraps optimizers with `model=` alone, where Horovod's would do: what it finds out, and what it follows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvfreeze.comm.replica_sync import check_replicas
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import ArgumentError, UsageError
from hvfreeze.integration.optimizer import DistributedOptimizer
from hvfreeze.model.tiny_lm import TinyLM
from tests.parallel.workers.own_optimizer import (
    Text,
    average_by_hand,
    hooks_on,
    note_what_is_told,
    parameters,
    raises,
    text_training,
)
from tests.parallel.workers.own_optimizer import start as start
from tests.single.integration.probed_script import Script, equal

LINES: list[str] = []


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


def wrap(model: nn.Module, world: World, **options: Any) -> DistributedOptimizer:
    """As a script does: the model, and nothing else."""
    return DistributedOptimizer(sgd(model), model=model, world=world, **options)


def said() -> list[str]:
    """Return the lines since the last call, but for those that say when votes are held, and forget them."""
    lines = [line for line in LINES if not line.startswith("votes by ")]
    LINES.clear()
    return lines


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def train_beside(
    world: World,
    ours: tuple[nn.Module, list[DistributedOptimizer]],
    theirs: tuple[nn.Module, list[torch.optim.Optimizer]],
    *,
    clip: float = 1e9,
) -> None:
    """Train a wrapped network beside its equal, whose gradients are averaged by hand, and compare them."""
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(4):
        x = torch.randn(5, 3, generator=generator)
        for net, optimizers in (ours, theirs):
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(x).square().mean().backward()
        average_by_hand(theirs[0], world)
        for wrapped in ours[1]:
            wrapped.synchronize()
        for net, _ in (ours, theirs):
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        for plain in theirs[1]:
            plain.step()
        for wrapped in ours[1]:
            with wrapped.skip_synchronize():
                wrapped.step()
    assert_close(ours[0], theirs[0])


def check_ranks_that_begin_apart_go_on_from_rank_0s_parameters(world: World) -> None:
    said()
    torch.manual_seed(world.rank)
    model, scale = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.Parameter(torch.randn(()))
    first = world.broadcast_object([*parameters(model), scale.detach().clone()], name="test.first")
    inner = torch.optim.SGD([*model.parameters(), scale], lr=0.0)
    optimizer = DistributedOptimizer(inner, model=model, world=world)
    (model(torch.randn(5, 3)) * scale).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, [*model.parameters(), scale], strict=True))
    optimizer.freezer.average_statistics()
    check_replicas(model, world, step=1)
    assert [("differed from rank 0" in line) for line in said()] == ([True] if world.rank == 0 else [])
    inner.param_groups[0]["lr"] = 0.1
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.randn(5, 3)) * scale).square().sum().backward()
        optimizer.step()
    assert said() == [], "it is said once"
    check_replicas(nn.ParameterList([*model.parameters(), scale]), world, step=3)
    assert scale.item() != first[-1].item(), "what is beside the model does not train"


def check_a_model_of_one_block_trains_and_a_line_says_that_nothing_freezes(world: World) -> None:
    said()
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    for model in (ours, theirs):
        nn.init.constant_(model.weight, 0.3), nn.init.zeros_(model.bias)
    wrapped = wrap(ours, world, settings=FreezeConfig(freeze="gradient-norm", interval=1))
    train_beside(world, (ours, [wrapped]), (theirs, [sgd(theirs)]), clip=0.1)
    lines = said()
    assert [line.startswith("no block will be frozen: Linear is a single block") for line in lines] == (
        [True] if world.rank == 0 else []
    ), lines


class Shared(nn.Module):
    """Its head uses the embedding's weight too: no two blocks can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def check_a_model_that_cannot_be_divided_trains_and_a_line_says_why(world: World) -> None:
    said()
    torch.manual_seed(0)
    model = Shared()
    before, optimizer = parameters(model), wrap(model, world)
    functional.cross_entropy(model(torch.arange(6)), torch.arange(6).flip(0)).backward()
    optimizer.step()
    assert not torch.equal(before[0], model.head.weight) and optimizer.freezer.cut == 0
    assert ["is used by embedding and head" in line for line in said()] == [True] * (world.rank == 0)
    check_replicas(model, world, step=1)
    wrap(TinyLM(20, context=8), world)
    assert ["and the last block is never frozen" in line for line in said()] == [True] * (world.rank == 0)


def check_named_parameters_are_looked_at_as_horovods(world: World) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    inner = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    cases: list[tuple[list[Any], str]] = [
        ([*one.named_parameters(), *other.named_parameters()], "bias, weight"),
        ([*one.named_parameters()], "lacks 2 of the optimizer's"),
        ([*one.parameters(), *other.parameters()], "(name, parameter) tuples"),
    ]
    for named, words in cases:
        raises(ArgumentError, words, lambda named=named: DistributedOptimizer(inner, named, model=one, world=world))  # type: ignore[misc]
        raises(ValueError, words, lambda named=named: DistributedOptimizer(inner, named, model=one, world=world))  # type: ignore[misc]
    wrapped = DistributedOptimizer(inner, model=one, world=world)
    names = world.allgather_object(sorted(wrapped._parameter_names.values()), name="test.names")
    assert len(set(names[0])) == 4 and names == names[:1] * world.size


def adversaries(world: World, wrapped: bool) -> tuple[nn.Module, nn.Module, Callable[[], None]]:
    """Return two networks and what trains them in turn, each while the other one's `requires_grad` is off."""
    torch.manual_seed(0)
    maker, judge = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
    )
    optimizers: list[Any] = [wrap(one, world) if wrapped else sgd(one) for one in (maker, judge)]
    generator = torch.Generator().manual_seed(world.rank)

    def turn() -> None:
        for number, trained in enumerate((maker, judge)):
            for net in (maker, judge):
                net.requires_grad_(net is trained)
            for optimizer in optimizers:
                optimizer.zero_grad()
            judge(maker(torch.randn(4, 3, generator=generator))).square().mean().backward()
            other = judge if trained is maker else maker
            assert all(parameter.grad is None for parameter in other.parameters())
            if not wrapped:
                average_by_hand(trained, world)
            optimizers[number].step()

    return maker, judge, turn


def check_networks_that_train_in_turn_are_followed(world: World) -> None:
    maker, judge, turn = adversaries(world, wrapped=True)
    plain_maker, plain_judge, plain_turn = adversaries(world, wrapped=False)
    for _ in range(3):
        turn()
        plain_turn()
    assert_close(maker, plain_maker)
    assert_close(judge, plain_judge)


def check_what_is_switched_off_rests_and_what_is_switched_on_travels(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)  # before wrapping: Horovod would never average it
    optimizer = wrap(model, world)
    generator = torch.Generator().manual_seed(world.rank)
    moved = []
    for on in ([0, 2], [2], [1, 2], [0, 1, 2]):
        before = parameters(model)[::2]
        for place, layer in enumerate(model):
            layer.requires_grad_(place in on)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        moved.append([place for place in range(3) if not torch.equal(before[place], model[place].weight)])  # type: ignore[arg-type]
        check_replicas(model, world, step=len(moved))
    # With momentum and decay an optimizer moves whatever it is given a gradient of, were it zero.
    assert moved == [[0, 2], [2], [1, 2], [0, 1, 2]], moved
    assert len(optimizer.state) == 6, "what rests keeps its state"
    assert len(optimizer.param_groups[0]["params"]) == 6


def check_ranks_that_switch_apart_find_out(world: World) -> None:
    from hvfreeze.errors import DivergedError

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = wrap(model, world)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(world.rank > 0)
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    raises(DivergedError, "which parameters are frozen", optimizer.step)
    for handle in list(getattr(world, "_line", [])):
        world._line.remove(handle)  # type: ignore[attr-defined]


def check_frozen_blocks_stay_frozen_when_a_script_switches_all_on(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = wrap(model, world)
    optimizer.freezer.freeze(1)
    before = parameters(model)[0]
    for _ in range(2):
        model.requires_grad_(True)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.synchronize()
        assert model[0].weight.grad is None, "its gradient would be clipped with the others"
        with optimizer.skip_synchronize():
            optimizer.step()
    assert torch.equal(before, model[0].weight)
    model[1].requires_grad_(False)
    optimizer.freezer.thaw(0)
    assert model[0].weight.requires_grad and not model[1].weight.requires_grad


def check_two_optimizers_are_under_way_at_once(world: World) -> None:
    ours, theirs = (nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))) for _ in range(2))
    theirs.load_state_dict(world.broadcast_object(ours.state_dict(), name="test.equal"))
    ours.load_state_dict(theirs.state_dict())
    train_beside(world, (ours, [wrap(one, world) for one in ours]), (theirs, [sgd(one) for one in theirs]))


EVERY_TWO = FreezeConfig(freeze="gradient-norm", interval=2, freeze_warmup=4, eta_max=float("inf"))


def train(model: nn.Module, optimizers: list[Any], world: World, *, steps: int, after: Any = None) -> None:
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        model(torch.randn(4, 3, generator=generator).to(dtype)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        if after is not None:
            after()


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))


def check_what_another_optimizer_trains_is_not_frozen(world: World) -> None:
    said()
    model = three_layers()
    front, rest = (
        DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), model=model, world=world, settings=EVERY_TWO)
        for part in (model[:3], model[3:])
    )
    train(model, [front, rest], world, steps=10)
    assert front.freezer.cut == 1 and rest.freezer.cut == 0, "each may freeze what it trains in front, but for its last"
    told = [
        line.split(" will not be frozen, because ")[0] for line in said() if "other code than this optimizer" in line
    ]
    assert sorted(told) == sorted(f"block {name} and later blocks" for name in ("0", "3")) * (world.rank == 0), told


def check_what_a_script_averages_itself_is_not_frozen_and_a_loss_keeps_a_gradient(world: World) -> None:
    class Followed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.follower = three_layers(), three_layers().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.first(x) + self.follower(x)
            return total

    for moves in (True, False):
        model = Followed()
        optimizer = wrap(model, world, settings=EVERY_TWO)

        def follow() -> None:
            with torch.no_grad():
                for mine, theirs in zip(model.follower.parameters(), model.first.parameters(), strict=True):  # noqa: B023
                    mine.lerp_(theirs, 0.1)

        train(model, [optimizer], world, steps=10, after=follow if moves else None)
        # Without its only blocks that train the loss would have no gradient.
        assert optimizer.freezer.cut == 0 and len(optimizer.freezer.chain.blocks) == 2


def check_a_later_optimizer_has_the_parameters_of_an_earlier_one(world: World) -> None:
    model = three_layers()
    earlier = wrap(model, world, settings=EVERY_TWO)
    train(model, [earlier], world, steps=20)
    assert earlier.freezer.cut == 2 and not model[1].training
    later = wrap(model, world)
    assert model[0].weight.requires_grad and model[1].training
    reference = copy.deepcopy(model)
    train_beside(world, (model, [later]), (reference, [sgd(reference)]))
    raises(UsageError, "another DistributedOptimizer was created later with the same parameters", earlier.step)


def check_a_model_may_move_to_another_type_or_format_after_wrapping(world: World) -> None:
    model = three_layers()
    optimizer = wrap(model, world)
    model.double()
    train(model, [optimizer], world, steps=2)
    assert model[0].weight.grad.dtype == torch.float64
    optimizer.freezer.average_statistics()
    check_replicas(model, world, step=2)
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    optimizer = wrap(images, world)
    images.to(memory_format=torch.channels_last)
    images(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    assert images[0].weight.grad.stride() == images[0].weight.stride()
    check_replicas(images, world, step=1)


def check_gradients_can_be_detached(world: World) -> None:
    model = three_layers()
    optimizer = wrap(model, world)

    def drop() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.detach_().zero_()  # as scripts did before zero_grad could

    train(model, [optimizer], world, steps=2, after=drop)
    assert [parameter.grad is None for parameter in model.parameters()] == [False] * 8


def check_a_model_that_trains_in_evaluation_mode_is_divided(world: World) -> None:
    model = Text().eval()
    optimizer = wrap(model, world)
    tokens = torch.ones(2, 6, dtype=torch.int64)
    model(tokens, torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert len(optimizer.freezer.chain.blocks) == 5 and hooks_on(model) == 0


def check_another_model_than_the_optimizers_is_told(world: World) -> None:
    said()
    model = three_layers()
    optimizer = DistributedOptimizer(sgd(model), model=three_layers(), world=world, settings=EVERY_TWO)
    train(model, [optimizer], world, steps=8)
    assert optimizer.freezer.cut == 0
    check_replicas(nn.ParameterList(model.parameters()), world, step=8)
    assert ["model= is a Sequential, but the optimizer has none of its parameters" in line for line in said()] == [
        True
    ] * (world.rank == 0)


def check_blocks_that_were_frozen_too_early_thaw_on_all_ranks(world: World) -> None:
    makes: list[tuple[Any, str]] = [
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, fused=True), "none"),
        (lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True), "powersgd:1"),
    ]
    for make, compression in makes:
        script, resumed = (Script(make, world=world, passes=2, compression=compression) for _ in range(2))
        model = script.model
        script.train(2, dtype=torch.bfloat16)
        script.freezer.freeze(2)
        frozen = copy.deepcopy([model.stem, model.middle])
        script.sent.clear()
        script.train(12, dtype=torch.bfloat16)
        assert equal(frozen[0], model.stem) and equal(frozen[1], model.middle)
        assert script.freezer.cut == 2 and len(set(script.sent)) <= 2, "gradients of frozen blocks travel"
        check_replicas(model.stem, world, step=14)
        said()
        saved = script.state()
        script.train(6, dtype=torch.bfloat16)
        history = script.freezer.cut_history
        assert history[1].cut == 2 and history[2].cut < 2 and history[2].step == 15, history
        told = [line for line in said() if line.startswith("step 15: thawed: ")]
        assert len(told) == (world.rank == 0) and all("(gains 0." in line for line in told), told
        script.freezer.average_statistics()
        check_replicas(model, world, step=20)
        assert not equal(frozen[1], model.middle)
        resumed.load(saved)
        resumed.train(6, dtype=torch.bfloat16)
        resumed.freezer.average_statistics()
        assert resumed.freezer.cut_history == history and equal(model, resumed.model)


def check_what_cannot_be_found_out_is_asked_for_by_name(world: World) -> None:
    model, optimizer, train = text_training(world, told=False)
    train(1)
    saved = optimizer.freezer_state_dict()
    raises(
        UsageError, "other parameters than this Shared", lambda: wrap(Shared(), world).load_freezer_state_dict(saved)
    )
    for settings, words in (
        (
            FreezeConfig(freeze="linear"),
            "freeze (linear) follows a schedule and needs steps_per_epoch= and num_epochs=",
        ),
        (FreezeConfig(freeze="gradient-norm", shadow="geometric"), "freeze (geometric) follows a schedule"),
        (FreezeConfig(freeze="auto"), "hvfreeze auto"),
        (FreezeConfig(freeze="static", cut=2), "pass example= (a batch of its inputs) or blocks="),
    ):
        raises(UsageError, words, lambda settings=settings: wrap(model, world, settings=settings))  # type: ignore[misc]
    listed = wrap(model, world, blocks=["head", "embedding", "layers.1"])
    assert [block.name for block in listed.freezer.chain.blocks] == ["head", "embedding", "layers.1"]
    raises(UsageError, "must be a string, or a list of names", lambda: wrap(model, world, blocks=[1, 2]))


def setting(world: World, root: Path) -> World:
    note_what_is_told(LINES)
    return world
