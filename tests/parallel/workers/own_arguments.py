"""Every rank trains beside `hvd.DistributedOptimizer`: with its arguments, and with every optimizer that torch has."""

from __future__ import annotations

import copy
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hvfreeze.comm.world import World
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import ArgumentError, UsageError
from hvfreeze.integration.cached_loader import CachedLoader
from hvfreeze.integration.optimizer import DistributedOptimizer
from tests.parallel.workers.checking import with_folder
from tests.parallel.workers.own_optimizer import note_what_is_told, raises
from tests.parallel.workers.own_optimizer import start as start

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LINES: list[str] = []


def dense() -> nn.Module:
    """Return a network of matrices alone, which every optimizer takes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 9, bias=False), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.Linear(5, 3, bias=False)
    )


class Sums(nn.Module):
    """Sums of embeddings whose gradients are sparse; those of the second one are there on `ranks` ranks."""

    def __init__(self, *, ranks: int = 64) -> None:
        super().__init__()
        self.ranks = ranks
        torch.manual_seed(0)
        self.words = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.rare = nn.Embedding(20, 4, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens)
        return found + self.rare(tokens[:, 0]) if hvd.rank() < self.ranks else found


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    if isinstance(model, Sums):
        return model(torch.randint(0, 20, (6, 3), generator=generator)).square().sum()
    return functional.mse_loss(model(torch.randn(6, 8, generator=generator)), torch.zeros(6, 3))


def trained(model: nn.Module, optimizer: Any, *, steps: int = 3) -> list[Tensor]:
    """Return the parameters after some steps, each rank with batches of its own."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, generator).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare(build: Callable[[], nn.Module], make: Make, *, exact: bool = True, **options: Any) -> None:
    """Train with Horovod's optimizer and with ours; two ranks' sums have the same bits in any order."""
    theirs, ours = build(), build()
    names = list(theirs.named_parameters())
    expected = trained(theirs, hvd.DistributedOptimizer(make(list(theirs.parameters())), names, **options))
    wrapped = DistributedOptimizer(make(list(ours.parameters())), list(ours.named_parameters()), model=ours, **options)
    assert isinstance(wrapped, torch.optim.Optimizer), "schedulers ask so"
    for mine, reference in zip(trained(ours, wrapped), expected, strict=True):
        if exact and hvd.size() == 2:
            assert torch.equal(mine, reference), (make, options, (mine - reference).abs().max())
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-5)


def ways(kind: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield the settings in which an optimizer takes gradients by other code."""
    known = inspect.signature(kind).parameters
    yield {}
    for name in ("foreach", "fused"):
        if name in known:
            yield {name: True, **{key: 0.01 for key in ("momentum", "weight_decay") if key in known}}


def check_every_optimizer_of_torch_steps_as_under_horovod(world: World) -> None:
    found = []
    for _, kind in sorted(inspect.getmembers(torch.optim, inspect.isclass)):
        if kind not in (torch.optim.Optimizer, torch.optim.LBFGS) and issubclass(kind, torch.optim.Optimizer):
            build = Sums if kind is torch.optim.SparseAdam else dense
            for settings in ways(kind):
                compare(build, partial(kind, lr=0.01, **settings))
                found.append(kind.__name__)
    assert {"Adafactor", "AdamW", "Muon", "SGD", "SparseAdam"} <= set(found) and len(found) > 20, found


def momentum(given: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.01)


def check_sums_and_divided_averages_mean_what_they_mean_there(world: World) -> None:
    half = hvd.Compression.fp16
    compare(dense, momentum, op=hvd.Average)
    compare(dense, momentum, op=hvd.Sum)
    compare(dense, momentum, gradient_predivide_factor=4.0)
    compare(dense, momentum, exact=False, gradient_predivide_factor=3.0)
    compare(dense, momentum, exact=False, op=hvd.Sum, compression=half)
    compare(dense, momentum, exact=False, gradient_predivide_factor=3.0, compression=half)
    model = dense()
    low = DistributedOptimizer(momentum([*model.parameters()]), model=model, compression="powersgd:1", op=hvd.Sum)
    low.reducer.uncompressed_steps = 0
    low.reducer.compress("powersgd:1")
    loss_of(model, torch.Generator().manual_seed(0)).backward()  # equal on all ranks
    plain = dense()
    loss_of(plain, torch.Generator().manual_seed(0)).backward()
    low.synchronize()
    own = [parameter.grad for parameter in plain.parameters()]  # type: ignore[misc]
    norms = [float(p.grad.norm() / alone.norm()) for p, alone in zip(model.parameters(), own)]  # type: ignore[union-attr]
    assert all(0.4 * hvd.size() < norm < 1.001 * hvd.size() for norm in norms), norms


def check_what_cannot_be_is_refused_by_name(world: World) -> None:
    model = dense()

    def wrap(**options: Any) -> DistributedOptimizer:
        return DistributedOptimizer(momentum([*model.parameters()]), model=model, **options)

    for unknown in ("auto", 16, hvd.Compression):
        words = f"compression ({unknown}) must be none, fp16, powersgd:R"
        raises(UsageError, words, lambda unknown=unknown: wrap(compression=unknown))  # type: ignore[misc]
    raises(UsageError, "op (Adasum) must be hvd.Average or hvd.Sum", lambda: wrap(op=hvd.Adasum))
    raises(ValueError, "gradient_predivide_factor (2.0)", lambda: wrap(op=hvd.Sum, gradient_predivide_factor=2.0))
    raises(ValueError, "backward_passes_per_step (0)", lambda: wrap(backward_passes_per_step=0))
    first = next(model.parameters())
    for groups, words in ((0, "at least 1"), ([["a"]], "lists of parameters"), ([[first], [first]], "in two groups")):
        raises(ArgumentError, words, lambda groups=groups: wrap(groups=groups))  # type: ignore[misc]
    raises(UsageError, "call hvd.add_process_set() first", lambda: wrap(process_set=hvd.ProcessSet([0])))


def check_groups_are_taken_and_it_is_told_once_that_they_do_nothing(world: World) -> None:
    LINES.clear()
    compare(dense, momentum, groups=2)
    beside = ("votes by ", "no block will be frozen: settings", "freed memory returns")
    told = [line for line in LINES if not line.startswith(beside)]
    assert [line.startswith("groups has no effect") for line in told] == [True] * (world.rank == 0), told
    model = dense()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        DistributedOptimizer(momentum([*model.parameters()]), model=model, num_groups=1)
    assert [(entry.category, entry.filename) for entry in seen] == [(DeprecationWarning, __file__)], seen


def check_a_step_after_synchronize_warns_as_there(world: World) -> None:
    model = dense()
    wrapped = DistributedOptimizer(momentum([*model.parameters()]), model=model)
    for skips in (False, True):
        loss_of(model, torch.Generator()).backward()
        wrapped.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if skips:
                with wrapped.skip_synchronize():
                    wrapped.step()
            else:
                wrapped.step()
        words = "optimizer.step() called without optimizer.skip_synchronize()"
        assert [words in str(entry.message) for entry in seen] == [True] * (not skips), seen


def scaled(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return the parameters after steps with a scaled loss, the second of which overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, generator) * (math.inf if step == 1 else 1.0)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_scaled_losses_train_as_there(world: World) -> None:
    for make in (momentum, partial(torch.optim.Adam, fused=True), partial(torch.optim.SGD, lr=0.1, fused=True)):
        theirs, ours = dense(), dense()
        expected = scaled(theirs, hvd.DistributedOptimizer(make(list(theirs.parameters())), theirs.named_parameters()))
        wrapped = DistributedOptimizer(make(list(ours.parameters())), model=ours)
        for mine, reference in zip(scaled(ours, wrapped), expected, strict=True):
            assert hvd.size() > 2 or torch.equal(mine, reference)
            torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-5)


def check_evidence_does_not_depend_on_the_scale_of_losses(world: World) -> None:
    def evidence(*, scaler: Any) -> list[list[float]]:
        torch.manual_seed(0)
        model = dense()
        settings = FreezeConfig(freeze="coherence", interval=100)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, settings=settings)
        seen = optimizer.freezer._coherence
        assert seen is not None
        seen.every = 2
        generator = torch.Generator().manual_seed(hvd.rank())
        for step in range(8):
            loss = loss_of(model, generator)
            if scaler is None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                continue
            for factor in [math.inf] * (step in (2, 5)) + [1.0]:
                optimizer.zero_grad()
                scaler.scale(factor * loss).backward(retain_graph=True)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
        return seen.latest

    plain = evidence(scaler=None)
    # Doubled after every two good steps, halved after those that overflow.
    scaled = evidence(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    assert len(plain) == len(scaled) == 4
    for row, other in zip(plain, scaled):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(row), rtol=1e-4, atol=0)


@with_folder
def check_ranks_cache_where_rank_0_does_if_nobody_names_a_directory(world: World, folder: Path) -> None:
    caches = [str(folder / f"cache{rank}") for rank in range(world.size)]
    before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), caches[world.rank]
    try:
        model = dense()
        optimizer = DistributedOptimizer(momentum([*model.parameters()]), model=model)
        data = TensorDataset(torch.zeros(8, 4), torch.zeros(8))
        CachedLoader(DataLoader(data, batch_size=4), optimizer).close()
        mixed = None if world.rank == 0 else caches[0]
        raises(
            UsageError,
            "directory= must be given on all ranks, or on none",
            lambda: CachedLoader(DataLoader(data, batch_size=4), optimizer, directory=mixed),
        )
        world.barrier(name="test.cached")
        assert [os.path.isdir(f"{cache}/hvfreeze/activations") for cache in caches] == [True] + [False] * (
            world.size - 1
        )
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def check_scaling_before_the_average_is_refused(world: World) -> None:
    model, scaler = dense(), torch.amp.GradScaler("cpu")
    wrapped = DistributedOptimizer(momentum([*model.parameters()]), model=model)
    scaler.scale(loss_of(model, torch.Generator())).backward()
    raises(UsageError, "GradScaler.step() must follow synchronize()", lambda: scaler.step(wrapped))
    wrapped.synchronize()


def check_sparse_gradients_travel_as_there(world: World) -> None:
    def plain(given: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(given, lr=0.1)

    ours = Sums(ranks=1)
    wrapped = DistributedOptimizer(plain([*ours.parameters()]), model=ours)
    # By hand: Horovod's own hangs where only some ranks have a gradient.
    reference = Sums(ranks=1)
    generators = [torch.Generator().manual_seed(hvd.rank()) for _ in range(2)]
    for _ in range(3):
        wrapped.zero_grad(), reference.zero_grad()
        loss_of(ours, generators[0]).backward()
        wrapped.synchronize()
        assert all(p.grad is not None and p.grad.is_sparse for p in ours.parameters()), "the optimizer may need it so"
        with wrapped.skip_synchronize():
            wrapped.step()
        loss_of(reference, generators[1]).backward()
        with torch.no_grad():
            for number, parameter in enumerate(reference.parameters()):
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                parameter.sub_(world.allreduce_sum(mine / world.size, name=f"test.sparse.{number}"), alpha=0.1)
    for mine, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    sent = wrapped.reducer.payload_bytes
    for sparse_as_dense in (False, True):
        model = nn.Sequential(nn.Embedding(200, 4, sparse=True), nn.Linear(4, 2))
        wrapped = DistributedOptimizer(plain([*model.parameters()]), model=model, sparse_as_dense=sparse_as_dense)
        model(torch.arange(3)).sum().backward()
        wrapped.synchronize()
        grad = model[0].weight.grad
        assert grad is not None and grad.is_sparse
        assert (wrapped.reducer.payload_bytes > 3000) == sparse_as_dense, sent


def check_a_sparse_weight_that_another_layer_uses_is_averaged_dense(world: World) -> None:
    model = nn.ModuleDict({"look": nn.Embedding(6, 3, sparse=True), "out": nn.Linear(3, 6, bias=False)})
    nn.init.constant_(model["look"].weight, 0.5)
    model["out"].weight = model["look"].weight  # type: ignore[assignment]
    wrapped = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    weight: Any = model["look"].weight
    rows = model["look"](torch.tensor([hvd.rank() % 6]))
    # On rank 0 its gradient is of both kinds, on the others sparse.
    (model["out"](rows).sum() if hvd.rank() == 0 else rows.sum()).backward()
    own = weight.grad.to_dense().clone()
    wrapped.synchronize()
    expected = world.allreduce_sum(own / world.size, name="test.tied")
    assert not weight.grad.is_sparse
    torch.testing.assert_close(weight.grad, expected)


def check_state_of_sparse_adam_is_broadcast(world: World) -> None:
    model = Sums()
    before = copy.deepcopy(model.state_dict())
    wrapped = DistributedOptimizer(torch.optim.SparseAdam(list(model.parameters()), lr=0.1), model=model)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    trained(model, wrapped, steps=1)


def setting(world: World, root: Path) -> World:
    warnings.filterwarnings("ignore", message="Parameter `num_groups`")
    note_what_is_told(LINES)
    return world
