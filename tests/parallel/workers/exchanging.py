"""Every rank drives a reducer alone, and compares what it gets with what all ranks' gradients say it must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from analysis.parts import vote_log
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.freezing.frozen_prefix import FrozenPrefix
from hvfreeze.model.blocks import Chain
from hvfreeze.runs.reading import Move
from tests.parallel.workers.own_optimizer import raises

SHAPES = [(40, 30), (30,), (16, 3, 5, 5), (7,), (20, 20)]


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(SHAPES)]
    with torch.no_grad():
        named[2][1].set_(named[2][1].to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    return named


def gradients(rank: int, step: int, *, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) * factor for shape in SHAPES]


def average(world: World, step: int, *, factor: float = 1.0) -> list[Tensor]:
    """Return what the exchange must give, in double precision."""
    all_ranks = [gradients(rank, step, factor=factor, dtype=torch.float64) for rank in range(world.size)]
    return [torch.stack(column).mean(dim=0) for column in zip(*all_ranks, strict=True)]


def backward(named: list[tuple[str, nn.Parameter]], wanted: list[Tensor]) -> None:
    sum((p * g).sum() for (_, p), g in zip(named, wanted, strict=True)).backward()  # type: ignore[union-attr]


def grads(named: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    return [p.grad for _, p in named if p.grad is not None]


def same_everywhere(world: World, tensors: list[Tensor], name: str) -> None:
    mine = [t.contiguous().view(-1).view(torch.int32).tolist() for t in tensors]
    everybody = world.allgather_object(mine, name=name)
    assert all(theirs == mine for theirs in everybody), "ranks have other bits"


def refuses(work: Callable[[], object], words: str) -> None:
    raises(UsageError, words, work)


R = 2
MATRICES = [(40, 30), (16, 75), (20, 20)]
THIN_BYTES = 4 * (sum(R * (n + m) for n, m in MATRICES) + 30 + 7)


def low_rank(world: World, named: list[tuple[str, nn.Parameter]], **options: Any) -> Reducer:
    reducer = Reducer(world, compression=f"powersgd:{R}", bucket_bytes=3000, piece_bytes=600, **options)
    reducer.carry(named)
    return reducer


def one_step(reducer: Reducer, named: list[tuple[str, nn.Parameter]], wanted: list[Tensor]) -> list[Tensor]:
    reducer.begin()
    backward(named, wanted)
    reducer.finish()
    return [g.clone() for g in grads(named)]


def check_low_rank_loses_nothing_and_has_the_same_bits_everywhere(world: World) -> None:
    """What ranks have sent is what they were given and what they still owe. `test_low_rank` follows the paper."""
    named = parameters()
    seen: list[float] = []
    reducer = low_rank(world, named, uncompressed_steps=2, observer=lambda slot, g: seen.append(float(g.abs().sum())))
    sent, given = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(6):
        before = reducer.payload_bytes
        seen.clear()
        got = one_step(reducer, named, gradients(world.rank, step))
        own = [float(g.abs().sum()) for g in gradients(world.rank, step)]
        torch.testing.assert_close(torch.tensor(sorted(seen)), torch.tensor(sorted(own)), rtol=1e-4, atol=0)
        same_everywhere(world, got, "low-rank")
        plain, compressed = average(world, step), step >= 2
        bytes_of_step = THIN_BYTES if compressed else 4 * sum(map(math.prod, SHAPES))
        assert reducer.payload_bytes - before == bytes_of_step
        assert not compressed or len(reducer._exchange.low_rank) == 2, "all in one group: none is ahead of another"
        for place in (1, 3) if compressed else range(5):
            torch.testing.assert_close(got[place].double(), plain[place], rtol=1e-5, atol=1e-6)
        for matrix in as_matrices(got):
            assert not compressed or int(torch.linalg.matrix_rank(matrix, rtol=1e-4)) == R
        sent = [a + b for a, b in zip(sent, plain, strict=True)]
        given = [a + b.double() for a, b in zip(given, got, strict=True)]
    kept = reducer.state_dict()["low_rank"]
    for name, all_sent, all_given in zip(("p0", "p2", "p4"), as_matrices(sent), as_matrices(given), strict=True):
        owed = world.allreduce_sum(kept[name]["error"].double(), name=f"owed.{name}") / world.size
        torch.testing.assert_close(all_given + owed, all_sent, rtol=1e-3, atol=1e-3)


def as_matrices(tensors: list[Tensor]) -> list[Tensor]:
    """Return p0, p2 and p4 as matrices, in the order of memory: p2 lies channels last."""
    return [tensors[0], tensors[2].permute(0, 2, 3, 1).reshape(16, 75), tensors[4]]


def check_low_rank_goes_on_from_its_state_and_loses_what_freezes(world: World) -> None:
    named = parameters()
    reducer = low_rank(world, named, uncompressed_steps=2)
    for step in range(4):
        one_step(reducer, named, gradients(world.rank, step))
        other = parameters()
        again = low_rank(world, other, uncompressed_steps=2)
        again.load_state_dict(reducer.state_dict())
        ahead = [one_step(again, other, gradients(world.rank, step + k)) for k in (1, 2)]
        if step == 1:
            one_step(reducer, named, gradients(world.rank, 2))
            straight = [grads(named), one_step(reducer, named, gradients(world.rank, 3))]
            assert all(torch.equal(a, b) for a, b in zip(ahead[1], straight[1], strict=True)), "resumed otherwise"
    kept = reducer.state_dict()["low_rank"]
    assert set(kept) == {"p0", "p2", "p4"}
    reducer.carry(named[2:])
    now = reducer.state_dict()["low_rank"]
    assert set(now) == {"p2", "p4"} and torch.equal(now["p4"]["error"], kept["p4"]["error"])
    assert torch.equal(now["p2"]["right"], kept["p2"]["right"])
    one_step(reducer, named[2:], gradients(world.rank, 9)[2:])
    reducer.carry(named)
    assert not reducer.state_dict()["low_rank"]["p0"]["error"].any(), "a thawed parameter remembers"
    one_step(reducer, named, gradients(world.rank, 10))


def check_what_low_rank_left_out_is_sent_once_with_the_next_whole_gradient(world: World) -> None:
    for after in ("none", "fp16", "powersgd:6"):
        named = parameters()
        reducer = low_rank(world, named, uncompressed_steps=0)
        for step in range(3):
            one_step(reducer, named, gradients(world.rank, step))
        kept = reducer.state_dict()["low_rank"]
        reducer.compress(after)
        other = parameters()
        resumed = Reducer(world, compression=after, uncompressed_steps=0, bucket_bytes=3000, piece_bytes=600)
        resumed.carry(other)
        resumed.load_state_dict(reducer.state_dict())
        # The first rank's last matrix takes no part in this step: what it owes goes all the same.
        wanted, mine = gradients(world.rank, 3), 4 if world.rank == 0 else 5
        for one, theirs in ((reducer, named), (resumed, other)):
            one.begin()
            backward(theirs[:mine], wanted[:mine])
            one.finish()
        assert all(torch.equal(a, b) for a, b in zip(grads(named), grads(other), strict=True)), "resumed otherwise"
        every = [gradients(rank, 3, dtype=torch.float64) for rank in range(world.size)]
        every[0][4].zero_()
        plain = as_matrices([torch.stack(column).mean(dim=0) for column in zip(*every, strict=True)])
        left_out = [kept[name]["error"].double() for name in ("p0", "p2", "p4")]
        owed = [world.allreduce_sum(mine, name=f"owed.{after}.{i}") / world.size for i, mine in enumerate(left_out)]
        whole = (2,) if after == "powersgd:6" else (0, 1, 2)
        for i in whole:
            assert float(owed[i].abs().max()) > 0.1, "low rank has left nothing out: this test says little"
            got = as_matrices([g.double() for g in grads(named)])[i]
            torch.testing.assert_close(got, plain[i] + owed[i], rtol=2e-3, atol=1e-2)
        assert not reducer.state_dict()["owed"], "it would be sent twice"
        reducer.compress(f"powersgd:{R}")
        again = reducer.state_dict()["low_rank"]
        assert [i for i, name in enumerate(("p0", "p2", "p4")) if not again[name]["error"].any()] == list(whole)


def check_ranks_that_compute_otherwise_are_refused(world: World) -> None:
    reducer = low_rank(world, parameters(), uncompressed_steps=0)
    if world.rank == world.size - 1:
        reducer._exchange.low_rank[-1]._in_order[-1].right[0, 0] += 1e-6
    refuses(reducer.begin, f"rank {world.size - 1} and rank 0 compute different bits")
    refuses(lambda: Reducer(world, compression="powersgd:0").carry([]), "powersgd:R with R in 1..256")


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
        assert reducer.payload_bytes - before == 4 * sum(map(math.prod, SHAPES))


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
    refuses(
        lambda: backward(named, gradients(0, 0)),
        "this is backward pass 1, but only 0 may run between begin() and finish()",
    )
    reducer.begin()
    backward(named, gradients(0, 0))
    refuses(lambda: backward(named, gradients(0, 0)), "this is backward pass 2, but only 1 may run")
    reducer.finish()
    refuses(lambda: backward(named, gradients(0, 0)), "use begin(passes=N)")
    reducer.begin(passes=2)
    backward(named, gradients(0, 0))
    refuses(reducer.finish, "finish() was called after 1 of the 2 backward passes")
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
    refuses(
        lambda: reducer.carry([("half", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))]),
        "parameter half has dtype bfloat16, but only float32 and float64",
    )


def freezer_of(world: World, body: list[Any], **rates: float) -> Freezer:
    """Return a freezer that watches norms, of SGD and a block for each module."""
    model = nn.Sequential(*body)
    return Freezer(
        Chain.from_modules(model, [(f"b{i}", part) for i, part in enumerate(body)]),
        optimizer=torch.optim.SGD(model.parameters(), **rates),
        reducer=Reducer(world),
        world=world,
        settings=FreezeConfig(freeze="gradient-norm"),
        cadence=Cadence(interval=2, warmup=100, steps_per_epoch=50, num_epochs=100),
    )


def check_what_the_user_took_out_of_training_stays_out(world: World) -> None:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    fixed = [body[1][0].weight, body[0][0].bias]
    for parameter in fixed:
        parameter.requires_grad_(False)
    values = [p.clone() for p in fixed]
    freezer = freezer_of(world, body, lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(9):
        if step in (3, 6):
            freezer.freeze(2) if step == 3 else freezer.thaw(0)
        freezer.reducer.begin()
        freezer.chain(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        freezer.reducer.finish()
        freezer.optimizer.step()
        freezer.after_step(1.0)
        assert not any(p.requires_grad for p in fixed), f"switched on in step {step}"
    assert all(torch.equal(p, before) for p, before in zip(fixed, values, strict=True)), "weight decay moved it"
    assert body[1][0].bias.requires_grad and body[0][0].weight.requires_grad


def check_an_interval_knows_nothing_of_the_one_before(world: World) -> None:
    torch.manual_seed(0)
    body = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    freezer = freezer_of(world, body, lr=0.0)
    for step in range(4):
        freezer.reducer.begin()
        x = torch.ones(2, 4) * (100.0 if step < 2 else 1.0)
        # The first block takes no part in the first step of the second interval, as where a branch is dropped.
        out = body[2](body[1](x)) if step == 2 else freezer.chain(x)
        out.sum().backward()
        freezer.reducer.finish()
        freezer.after_step(1.0)
    (before, after) = freezer._seen.norms
    assert before[0] > 0 and abs(after[0] / before[0] - 1 / 200) < 1e-4, (before, after)


def check_ranks_that_take_turns_in_one_process_observe_what_ranks_at_once_do(world: World) -> None:
    vote_log.RANKS = world.size

    class Batches:
        """What `gradients_of` asks of shards."""

        def batch(self, step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            own = torch.Generator().manual_seed(100 * step + rank)
            return torch.randn(6, 3, 8, 8, generator=own), torch.randint(0, 10, (6,), generator=own)

    torch.manual_seed(0)
    ours, theirs = vote_log.network(), vote_log.network()
    theirs.model.load_state_dict(ours.model.state_dict())
    optimizers = [vote_log.sgd(chain, 0.05) for chain in (ours, theirs)]
    freezer = Freezer(
        ours,
        optimizer=optimizers[0],
        reducer=Reducer(world),
        world=world,
        settings=FreezeConfig(freeze="none", shadow="gradient-norm,coherence", vote_weight="snr"),
        cadence=Cadence(interval=4, warmup=4, steps_per_epoch=50, num_epochs=100),
    )
    prefix = FrozenPrefix(theirs, optimizers[1])
    turns = vote_log.Ranks(prefix, optimizers[1], range(world.size))
    prefix.on_move(turns.follow)
    prefix.move(Move(0, 0, 0))
    random, interval = torch.Generator(), None
    for step in range(1, 13):
        images, labels = Batches().batch(step, world.rank, random)
        freezer.reducer.begin()
        loss = torch.nn.functional.cross_entropy(ours(images), labels)
        loss.backward()
        freezer.reducer.finish()
        gradients, losses = vote_log.gradients_of(prefix, Batches(), step, random)  # type: ignore[arg-type]
        turns.observe(gradients, losses)
        for optimizer in optimizers:
            optimizer.step()
        decision = freezer.after_step(loss.item())
        if step % 4:
            continue
        interval, earlier = turns.end_interval(step), interval
        assert decision is not None
        told = list(zip(interval["signals"], decision.weights, strict=True))
        assert all(abs(a - b) <= 1e-6 + 1e-3 * b for a, b in told), told
        if step > 4:
            for before, after, own in zip(earlier["norms"], interval["norms"], decision.etas):
                known = [(abs(b - a) / b, eta) for b, a, eta in zip(before, after, own[:-1])]
                assert all(abs(eta - other) < 1e-3 for eta, other in known), (before, after, own)
            mine, seen = freezer._coherence.gains, turns.coherent[world.rank].gains
            largest = max(abs(value) for row in seen for value in row)
            assert len(mine) == len(seen) > 2
            assert all(abs(a - b) < 1e-3 * largest for x, y in zip(mine, seen) for a, b in zip(x, y)), (mine, seen)
