"""Every rank drives a reducer alone, and compares what it gets with what all ranks' gradients say it must be."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hvfreeze.chain.blocks import Chain
from hvfreeze.config.sections import FreezeConfig
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.reducer import Reducer
from hvfreeze.ranks.world import World
from tests.parallel.workers import thin_exchanges
from tests.parallel.workers.checking import run_checks
from tests.parallel.workers.known_gradients import (
    SHAPES,
    average,
    backward,
    gradients,
    grads,
    parameters,
    raises,
    same_everywhere,
)


def check_gradients_of_several_passes_are_added_and_sent_once(world: World) -> None:
    seen: list[tuple[int, Tensor]] = []
    named = parameters()
    reducer = Reducer(
        world, bucket_bytes=3000, backward_passes_per_step=3, observer=lambda slot, g: seen.append((slot, g.clone()))
    )
    reducer.carry(named)
    for step, passes in enumerate((3, 2, 1)):
        seen.clear()
        before = reducer.payload_bytes
        reducer.begin(passes=None if passes == 3 else passes)
        for _ in range(passes):
            backward(named, gradients(world.rank, step))
        reducer.finish()
        for got, one in zip(grads(named), average(world, step), strict=True):
            torch.testing.assert_close(got.double(), one * passes, rtol=1e-5, atol=1e-6)
        assert sorted(slot for slot, _ in seen) == list(range(len(named))), "the observer saw a pass, not a step"
        for slot, own in seen:
            torch.testing.assert_close(own, gradients(world.rank, step)[slot] * passes, rtol=1e-5, atol=1e-6)
        assert reducer.payload_bytes - before == (4 * sum(map(math.prod, SHAPES)) if world.size > 1 else 0)


def check_a_parameter_may_miss_passes(world: World) -> None:
    named = parameters()
    reducer = Reducer(world, bucket_bytes=3000)
    reducer.carry(named)
    for _ in range(2):
        reducer.begin(passes=2)
        backward(named, gradients(world.rank, 0))
        mine = [0, 1, 2, 3] if world.rank == 0 else [0, 1, 2]
        backward([named[i] for i in mine], [gradients(world.rank, 0)[i] for i in mine])
        reducer.finish()
        own = [gradients(r, 0, dtype=torch.float64) for r in range(world.size)]
        some = sum(own[r][3] * (2 if r == 0 else 1) for r in range(world.size)) / world.size
        torch.testing.assert_close(grads(named)[0].double(), 2 * average(world, 0)[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads(named)[3].double(), some, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads(named)[4].double(), average(world, 0)[4], rtol=1e-5, atol=1e-6)


def check_other_numbers_of_passes_are_refused(world: World) -> None:
    named = parameters()
    reducer = Reducer(world)
    reducer.carry(named)
    raises(lambda: backward(named, gradients(0, 0)), "backward pass 1 where 0 may be between begin() and finish()")
    reducer.begin()
    backward(named, gradients(0, 0))
    raises(lambda: backward(named, gradients(0, 0)), "backward pass 2 where 1 may be")
    reducer.finish()
    raises(lambda: backward(named, gradients(0, 0)), "give begin(passes=N)")
    reducer.begin(passes=2)
    backward(named, gradients(0, 0))
    raises(reducer.finish, "finish() after 1 of 2 backward passes")
    backward(named, gradients(0, 0))
    reducer.finish()


def check_halves_lose_no_small_gradient_and_no_large_one(world: World) -> None:
    named = parameters()
    named[2][1].requires_grad_(True)
    reducer = Reducer(world, compression="fp16", bucket_bytes=3000, piece_bytes=600)
    reducer.carry(named)
    saved = None
    # From one to far below float16's smallest number, and up again at once; then as large as float32 allows.
    factors = [1.0, 1.0, 1e-3, 1e-7, 1e-12, 1e-12, 1.0, 1e9, 1e9, 1e-30, 1e-30]
    for step, factor in enumerate(factors):
        before = reducer.payload_bytes
        reducer.begin()
        backward(named, gradients(world.rank, step, factor=factor))
        reducer.finish()
        if world.size == 1:
            continue
        steady = step > 0 and factors[step - 1] == factor
        for got, wanted in zip(grads(named), average(world, step, factor=factor), strict=True):
            off = float((got.double() - wanted).abs().max() / wanted.abs().max())
            assert off < 2e-3, (step, factor, off)
            if steady:
                lost = (got == 0) & (wanted.abs() > 1e-4 * wanted.abs().max())
                assert not lost.any(), "values were flushed to zero"
        same_everywhere(world, grads(named), "halves")
        assert reducer.gradients_are_finite()
        elements = sum(map(math.prod, SHAPES))
        if steady and factor > 1e-20:
            assert reducer.payload_bytes - before == 2 * elements
        if step == 4:
            saved = reducer.state_dict()
        if step == 5:
            again = Reducer(world, compression="fp16", bucket_bytes=3000, piece_bytes=600)
            other = parameters()
            again.carry(other)
            again.load_state_dict(saved or {})
            again.begin()
            backward(other, gradients(world.rank, step, factor=factor))
            again.finish()
            assert all(torch.equal(a, b) for a, b in zip(grads(named), grads(other), strict=True)), "resumed otherwise"
    for step, factor in enumerate((math.nan, 1.0, math.inf)):
        reducer.begin()
        backward(named, [g * (factor if world.rank == world.size - 1 else 1) for g in gradients(world.rank, step)])
        reducer.finish()
        assert reducer.gradients_are_finite() == math.isfinite(factor)


def check_double_precision_is_kept_and_others_are_refused(world: World) -> None:
    named = parameters(torch.float64)
    named[1] = ("p1", nn.Parameter(torch.zeros(30)))
    reducer = Reducer(world, bucket_bytes=3000)
    reducer.carry(named)
    reducer.begin()
    wanted = gradients(world.rank, 0, dtype=torch.float64)
    wanted[1] = wanted[1].float()
    backward(named, wanted)
    reducer.finish()
    for i, (got, exact) in enumerate(zip(grads(named), average(world, 0), strict=True)):
        assert got.dtype == named[i][1].dtype
        tolerance = 1e-6 if i == 1 else 1e-14
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    assert reducer.gradients_are_finite()
    raises(
        lambda: reducer.carry([("half", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))]),
        "parameter half is bfloat16; gradients of float32 and float64",
    )


def check_what_the_user_took_out_of_training_stays_out(world: World) -> None:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*body)
    chain = Chain.from_modules(model, [(f"b{i}", part) for i, part in enumerate(body)])
    fixed = [body[1][0].weight, body[0][0].bias]
    for parameter in fixed:
        parameter.requires_grad_(False)
    values = [p.clone() for p in fixed]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    freezer = Freezer(
        chain,
        optimizer=optimizer,
        reducer=Reducer(world),
        world=world,
        settings=FreezeConfig(freeze="gradient-norm"),
        cadence=Cadence(interval=2, warmup=100, steps_per_epoch=50, num_epochs=100),
    )
    for step in range(9):
        if step in (3, 6):
            freezer.freeze(2) if step == 3 else freezer.thaw(0)
        freezer.reducer.begin()
        chain(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        freezer.reducer.finish()
        optimizer.step()
        freezer.after_step(1.0)
        assert not any(p.requires_grad for p in fixed), f"switched on in step {step}"
    assert all(torch.equal(p, before) for p, before in zip(fixed, values, strict=True)), "weight decay moved it"
    assert body[1][0].bias.requires_grad and body[0][0].weight.requires_grad


def check_an_interval_knows_nothing_of_the_one_before(world: World) -> None:
    torch.manual_seed(0)
    body = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    model = nn.Sequential(*body)
    chain = Chain.from_modules(model, [(f"b{i}", part) for i, part in enumerate(body)])
    freezer = Freezer(
        chain,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        reducer=Reducer(world),
        world=world,
        settings=FreezeConfig(freeze="gradient-norm"),
        cadence=Cadence(interval=2, warmup=100, steps_per_epoch=50, num_epochs=100),
    )
    for step in range(4):
        freezer.reducer.begin()
        x = torch.ones(2, 4) * (100.0 if step < 2 else 1.0)
        # The first block takes no part in the first step of the second interval, as where a branch is dropped.
        out = model[2](model[1](x)) if step == 2 else model(x)
        out.sum().backward()
        freezer.reducer.finish()
        freezer.after_step(1.0)
    (before, after) = freezer._seen.norms
    assert before[0] > 0 and abs(after[0] / before[0] - 1 / 200) < 1e-4, (before, after)


if __name__ == "__main__":
    run_checks({**vars(thin_exchanges), **globals()}, on=lambda world: world)
