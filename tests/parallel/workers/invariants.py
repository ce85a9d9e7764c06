"""Every rank drives the parts as a user's own loop would, and checks what must hold after each step."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

import hvfreeze.comm.horovod_world
from hvfreeze.comm import agreement, replica_sync
from hvfreeze.comm.reducer import Observer, Reducer
from hvfreeze.comm.replica_sync import check_replicas, parameter_digest
from hvfreeze.comm.world import World
from hvfreeze.config.data import DataConfig
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.config.tree import Config
from hvfreeze.data.batches import open_feeds
from hvfreeze.data.data_sets import open_data
from hvfreeze.data.decoding import MemoryPixels
from hvfreeze.data.images import TURNED
from hvfreeze.data.reading import ORIENTATION
from hvfreeze.errors import DivergedError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.criteria import CRITERIA, Criterion
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.model.blocks import Chain
from hvfreeze.runs.clock import SET_UP_PHASES, PhaseClock
from hvfreeze.samples import opening as samples
from tests.parallel.workers.checking import messages
from tests.program import save_photos


def block(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU())


class Parts:
    """A small chain with everything that trains it; data differ between ranks, parameters do not."""

    def __init__(self, world: World, *, compression: str = "none", **settings: object) -> None:
        torch.manual_seed(0)
        body = [block(3, 8), block(8, 8), block(8, 12), nn.Sequential(nn.Flatten(), nn.Linear(12 * 36, 5))]
        self.model = nn.Sequential(*body)
        self.chain = Chain.from_modules(self.model, [(f"block{i}", part) for i, part in enumerate(body)])
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.world = world
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        self.reducer = Reducer(world, compression=compression, bucket_bytes=2000, piece_bytes=600)
        self.freezer = Freezer(
            self.chain,
            optimizer=self.optimizer,
            reducer=self.reducer,
            world=world,
            settings=FreezeConfig(**settings),  # type: ignore[arg-type]
            cadence=Cadence(interval=2, warmup=4, steps_per_epoch=4, num_epochs=100),
        )
        self.random = torch.Generator().manual_seed(world.rank)

    def step(self, *, poison: bool = False) -> object:
        self.model.train()
        images = torch.randn(6, 3, 6, 6, generator=self.random)
        labels = torch.randint(0, 5, (6,), generator=self.random)
        loss = nn.functional.cross_entropy(self.chain(images), labels)
        if poison:
            loss = loss * math.nan
        self.reducer.begin()
        self.reducer.signal(nonfinite=not math.isfinite(loss.item()))
        loss.backward()
        self.signals = self.reducer.finish()
        if self.signals.nonfinite:
            return None
        self.optimizer.step()
        decision = self.freezer.after_step(loss.item())
        digests = self.world.allgather_object(digest(self.chain.named_parameters()), name="test.parameters")
        assert len(set(digests)) == 1, "parameters differ between ranks"
        assert len(set(self.world.allgather_object(self.freezer.cut, name="test.cut"))) == 1
        return decision


def digest(named: list[tuple[str, nn.Parameter]] | list[tuple[str, Tensor]]) -> str:
    return parameter_digest(
        nn.ParameterDict({n.replace(".", "_"): nn.Parameter(t.detach().double()) for n, t in named})
    )


class Odd(nn.Module):
    """Tensors of many types, shapes, sizes and layouts."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(rank)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)):
            shape = ((), (5,), (0, 3), (7,), (2, 9))[number]
            self.register_buffer(f"of{number}", (torch.rand(shape, generator=random) * 9).to(dtype))
        self.large = nn.Parameter(torch.rand(40, 40, generator=random), requires_grad=False)


def check_models_of_any_tensors_become_rank_0s(world: World) -> None:
    usual = replica_sync.PACK_BYTES
    for size in (1, 100, usual):
        torch.manual_seed(world.rank)
        model = Odd(world.rank)
        replica_sync.PACK_BYTES = size
        replica_sync.broadcast_model(model, world)
        digests = world.allgather_object(parameter_digest(model), name="test.digests")
        assert len(set(digests)) == 1, f"models differ where {size} bytes travel together"
        torch.manual_seed(0)
        assert world.rank > 0 or digests[0] == parameter_digest(Odd(0)), "rank 0's model has changed"
    replica_sync.PACK_BYTES = usual


def check_models_that_cannot_become_equal_are_refused_by_all(world: World) -> None:
    last = world.rank == world.size - 1
    # As many bytes on all ranks, so that nothing but the names could tell.
    model = nn.ModuleDict({"theirs" if last else "ours": nn.Linear(3, 2)})
    try:
        replica_sync.broadcast_model(model, world)
    except DivergedError as error:
        assert f"the model of rank {world.size - 1} has other parameters" in str(error), str(error)
    else:
        raise AssertionError("a model with other names was accepted")


def check_every_ranks_bytes_arrive_whole_at_rank_0(world: World) -> None:
    before, hvfreeze.comm.horovod_world.PIECE_BYTES = hvfreeze.comm.horovod_world.PIECE_BYTES, 4096
    try:
        sent = [torch.arange(3000 * rank, dtype=torch.int64).to(torch.uint8) for rank in range(world.size)]
        received = world.gather_bytes(sent[world.rank], name="test.bytes")
    finally:
        hvfreeze.comm.horovod_world.PIECE_BYTES = before
    if world.rank == 0:
        assert len(received) == world.size
        assert all(torch.equal(theirs, ours) for theirs, ours in zip(received, sent))
    else:
        assert received == []


def check_tensors_of_all_ranks_come_together_at_rank_0(world: World) -> None:
    """As they lie in memory, in as many messages as it takes; rank 0's own are not copied."""

    def of(rank: int) -> list[tuple[str, torch.Tensor]]:
        weight = torch.arange(60.0).add(rank).view(2, 5, 2, 3).contiguous(memory_format=torch.channels_last)
        count = torch.tensor(rank, dtype=torch.int64)
        return [(f"{rank}.{name}", t) for name, t in (("weight", weight), ("count", count), ("none", torch.empty(0)))]

    usual, mine = agreement.PACK_BYTES, of(world.rank)
    for size in (1, 250, usual):
        agreement.PACK_BYTES = size
        found = agreement.gather_tensors(world, mine, name=f"test.tensors.{size}")
        expected = dict(each for rank in range(world.size) for each in of(rank)) if world.rank == 0 else {}
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
            assert found[name].stride() == tensor.stride()
        assert world.rank > 0 or all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in mine)
    agreement.PACK_BYTES = usual


def check_a_tree_of_images_is_read_by_one_rank_and_known_to_all(world: World) -> None:
    folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "", name="test.folder")
    if world.rank == 0:
        save_photos(Path(folder), training=6 * world.size)
        for number in range(5):
            path = Path(folder) / "train" / "a" / f"{number:02d}.png"
            exif = Image.Exif()
            exif[ORIENTATION] = 3
            Image.open(path).save(path, exif=exif)
    world.barrier(name="test.photos")
    looks, look = [], samples.list_data
    samples.list_data = lambda *of: looks.append(of) or look(*of)  # type: ignore[attr-defined,func-returns-value]
    try:
        data, optimizer = DataConfig(data="imagefolder", data_dir=folder), OptimizerConfig(batch_size=2)
        config, clock = Config(data=data, optimizer=optimizer), PhaseClock(SET_UP_PHASES)
        corpus = samples.open_corpus(config, world, replicas=world.size, clock=clock)
    finally:
        samples.list_data = look  # type: ignore[attr-defined]
    assert world.allgather_object(len(looks), name="test.looks") == [1] + [0] * (world.size - 1)
    alone = open_data("imagefolder", folder)
    for mine, theirs in ((corpus.train, alone.train), (corpus.evaluated, alone.test)):
        assert mine.identity() == theirs.identity() and mine.classes == theirs.classes
        assert (mine.decode(3) == theirs.decode(3)).all() and torch.equal(mine.labels, theirs.labels)
    assert f"5 of {12 * world.size} train {TURNED}" in corpus.notes
    feed, evaluated = open_feeds(corpus, data, seed=0, replica=world.rank, budget_bytes=10**9, fits_head=False)
    content = samples.content_of(world, corpus, feed, evaluated)
    for part, image_set in (("train", alone.train), ("test", alone.test)):
        whole = MemoryPixels(image_set, image_set.ids, workers=1).content(image_set.ids)
        assert content[f"{part} pixels"] == f"{whole:016x}", "other ranks, the same content"
    world.barrier(name="test.seen")
    if world.rank == 0:
        shutil.rmtree(folder)


def frozen_state(parts: Parts, cut: int) -> list[Tensor]:
    return [t.clone() for _, t in [*parts.chain.named_parameters(0, cut), *parts.chain.named_buffers(0, cut)]]


def check_frozen_blocks_do_not_move(world: World) -> None:
    parts = Parts(world)
    for _ in range(3):
        parts.step()
    momentum = {n: parts.optimizer.state[p]["momentum_buffer"].clone() for n, p in parts.chain.named_parameters(2)}
    parts.freezer.freeze(2)
    check_replicas(parts.model, world, step=3)
    for name, parameter in parts.chain.named_parameters(2):
        assert torch.equal(parts.optimizer.state[parameter]["momentum_buffer"], momentum[name]), "momentum was lost"
    before, frozen_before = frozen_state(parts, 2), frozen_state(parts, 1)
    thawed = parts.model[1][0].weight.clone()
    head = parts.model[3][1].weight.clone()
    for _ in range(5):
        parts.step()
    assert all(torch.equal(a, b) for a, b in zip(before, frozen_state(parts, 2), strict=True)), "a frozen block moved"
    assert not torch.equal(head, parts.model[3][1].weight)
    assert all(not m.training for m in parts.chain.modules(0, 2)) and parts.model[2].training
    assert all(p.grad is None and p not in parts.optimizer.state for _, p in parts.chain.named_parameters(0, 2))

    parts.freezer.thaw(1)
    assert parts.model[1].training and not parts.model[0].training
    assert all(p not in parts.optimizer.state for _, p in parts.chain.named_parameters(1, 2)), "old momentum came back"
    for _ in range(2):
        parts.step()
    still = frozen_state(parts, 1)
    assert all(torch.equal(a, b) for a, b in zip(frozen_before[: len(still)], still, strict=True))
    assert not torch.equal(parts.model[1][0].weight, thawed), "the thawed block rests"
    assert len(parts.optimizer.param_groups[0]["params"]) == len(parts.chain.named_parameters(1))


def check_a_frozen_parameter_that_is_moved_by_hand_is_noticed(world: World) -> None:
    parts = Parts(world)
    parts.freezer.freeze(1)
    parts.step()
    with torch.no_grad():
        parts.model[0][0].weight.add_(1e-3)
    try:
        parts.step()
    except DivergedError as error:
        assert "0.0.weight" in str(error)
    else:
        raise AssertionError("nobody noticed")


def check_votes_move_all_ranks_alike(world: World) -> None:
    parts = Parts(world, freeze="gradient-norm", eta_max=math.inf, vote_weight="snr", quorum=0.3, shadow="percentile")
    lines = []
    for _ in range(24):
        decision = parts.step()
        if decision is not None:
            check_replicas(parts.model, world, step=parts.freezer.step)  # buffers too: averaged at every vote
            lines.append(decision)
    assert len(set(world.allgather_object(str(lines), name="test.votes"))) == 1
    assert parts.freezer.cut > 0, "24 steps without a single frozen block"
    assert any(len(set(line.proposals)) > 1 for line in lines), "local signals never differed"


def check_a_vote_is_one_message_and_only_statistics_that_can_differ_are_averaged(world: World) -> None:
    parts = Parts(world, freeze="percentile", shadow="coherence,linear", eta_max=1e-12, vote_weight="loss")
    after_step, sent = parts.freezer.after_step, list[list[str]]()

    def counted(loss: float) -> object:
        with messages(world) as names:
            decision = after_step(loss)
        sent.append(sorted(names))
        return decision

    parts.freezer.after_step = counted  # type: ignore[method-assign,assignment]
    averages, ballots = ["batchnorm.mean", "batchnorm.variance"], ["vote.ballots"]
    for _ in range(6):
        parts.step()
    assert sent == [[], [], [], averages + ballots, [], averages + ballots], sent
    with messages(world) as names:
        parts.freezer.freeze(3)
    assert names == averages, "the blocks that freeze"
    del sent[:]
    before = frozen_state(parts, 3)
    for _ in range(4):
        parts.step()
    assert sent == [[], ballots, [], ballots], sent
    assert all(torch.equal(a, b) for a, b in zip(before, frozen_state(parts, 3), strict=True))
    with messages(world) as names:
        parts.freezer.thaw(1)
    assert names == [], "what was frozen is equal already"
    del sent[:]
    for _ in range(2):
        parts.step()
    assert sent == [[], averages + ballots], sent
    check_replicas(parts.model, world, step=12)


def check_statistics_that_differ_where_blocks_are_frozen_from_the_start_become_equal(world: World) -> None:
    parts = Parts(world, freeze="static", cut=2)
    parts.model[0][1].running_mean.fill_(world.rank)
    parts.freezer.average_statistics()
    assert torch.equal(parts.model[0][1].running_mean, torch.full((8,), (world.size - 1) / 2))
    # A state of an earlier version does not record which parameters are equal.
    state = parts.freezer.state_dict()
    del state["averaged"]
    parts.freezer.load_state_dict(state)
    parts.model[0][1].running_mean.fill_(world.rank)
    parts.freezer.average_statistics()
    assert torch.equal(parts.model[0][1].running_mean, torch.full((8,), (world.size - 1) / 2))


def check_a_rank_s_gains_are_products_of_its_gradient_with_the_others(world: World) -> None:
    own: list[dict[str, Tensor]] = []
    for compression in ("none", "powersgd:2"):
        own.clear()
        parts = Parts(world, freeze="coherence", compression=compression)
        parts.reducer.uncompressed_steps = 0
        seen = parts.freezer._coherence
        assert seen is not None
        observe = parts.reducer.observer
        assert observe is not None

        def look(slot: int, gradient: Tensor, parts: Parts = parts, observe: Observer = observe) -> None:
            own[-1][parts.reducer.carried[slot][0]] = gradient.clone()
            observe(slot, gradient)

        parts.reducer.observer = look
        for _ in range(2):
            own.append({})
            parts.step()
        others = world.allgather_object(own[0], name="test.gradients")
        blocks = range(len(parts.chain.blocks))
        across = compression == "none"
        compared = [g for rank, g in enumerate(others) if rank != world.rank] if across else [own[1]]
        expected = [
            0.1
            * sum(
                float((own[0][name] * other[name]).sum())
                for other in compared
                for name, _ in parts.chain.named_parameters(b, b + 1)
            )
            / len(compared)
            for b in blocks
        ]
        rows = seen.latest or list(map(list, seen.complete[-1]))
        assert torch.allclose(torch.tensor(rows[0]), torch.tensor(expected), rtol=1e-3, atol=1e-5), (rows, expected)


def check_a_saved_state_goes_on_where_gains_are_sampled(world: World) -> None:
    settings = {"freeze": "coherence", "quorum": 0.25}
    # Labels are random: nothing is known to be gained, and the criterion itself would freeze nothing.
    usual = CRITERIA["coherence"]
    CRITERIA["coherence"] = Criterion(lambda seen: min(seen.cut + (sum(seen.peaks) > 0), 3), watches="gains")
    straight, again = Parts(world, **settings), Parts(world, **settings)
    for _ in range(21):
        straight.step()
    for name in ("freezer", "model", "optimizer", "reducer"):
        getattr(again, name).load_state_dict(copy.deepcopy(getattr(straight, name).state_dict()))
    again.random.set_state(straight.random.get_state())
    for _ in range(12):
        straight.step()
        again.step()
    assert digest(straight.chain.named_parameters()) == digest(again.chain.named_parameters())
    assert straight.freezer.cut_history == again.freezer.cut_history
    assert straight.freezer.cut > 0, "no vote has moved the cut: this test says little"
    CRITERIA["coherence"] = usual


def check_averaged_signals_leave_nothing_to_vote_on(world: World) -> None:
    parts = Parts(world, freeze="gradient-norm", eta_max=math.inf, signal="averaged")
    seen: list[float] = []
    for _ in range(10):
        decision = parts.step()
        if decision is not None:
            assert len(set(decision.proposals)) == 1  # type: ignore[attr-defined]
            etas = decision.etas  # type: ignore[attr-defined]
            assert all(row == etas[0] for row in etas)
            seen += [eta for eta in etas[0] if eta]
    assert seen, "the averaged gradients were never looked at"


def check_only_the_suffix_travels(world: World) -> None:
    for compression, width in (("none", 4), ("fp16", 2)):
        parts = Parts(world, compression=compression)
        sent = 0
        for cut in (0, 1, 3):
            parts.freezer.freeze(cut)
            parts.step()
            parts.step()
            sent += 2 * width * sum(p.numel() for _, p in parts.chain.named_parameters(cut))
        assert parts.reducer.payload_bytes == sent, (parts.reducer.payload_bytes, sent)


def check_the_gradient_is_the_mean_over_ranks(world: World) -> None:
    parts = Parts(world)
    images = torch.randn(6, 3, 6, 6, generator=parts.random)
    loss = parts.chain(images).square().mean()
    grads = torch.autograd.grad(loss, [p for _, p in parts.chain.named_parameters()], retain_graph=True)
    expected = [world.allreduce_sum(g, name=f"test.{i}") / world.size for i, g in enumerate(grads)]
    parts.reducer.begin()
    loss.backward()  # type: ignore[no-untyped-call]
    parts.reducer.finish()
    for (name, parameter), mean in zip(parts.chain.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-7, msg=name)
        assert parameter.grad.stride() == parameter.stride()


def check_large_halves_do_not_overflow(world: World) -> None:
    weight = nn.Parameter(torch.zeros(10))
    reducer = Reducer(world, compression="fp16")
    reducer.carry([("weight", weight)])
    reducer.begin()
    (weight * 40000.0).sum().backward()  # type: ignore[no-untyped-call]
    reducer.finish()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((10,), 40000.0), rtol=1e-2, atol=0)


def check_unequal_frozen_sets_are_refused_by_all(world: World) -> None:
    for odd in ([3], [0, 1]):  # another size, and the same size under other names
        parameters = [(f"p{i}", nn.Parameter(torch.zeros(4))) for i in range(4)]
        reducer = Reducer(world)
        mine = odd if world.rank == world.size - 1 else ([0] if len(odd) == 1 else [2, 3])
        reducer.carry([parameters[i] for i in mine])
        reducer.begin()
        sum(parameters[i][1].sum() for i in mine).backward()  # type: ignore[union-attr]
        try:
            reducer.finish()
            refused = False
        except DivergedError:
            refused = True
        for bucket in reducer._exchange.buckets:
            try:
                for handle in bucket.handles:
                    world.wait(handle)
            except DivergedError:
                assert refused
        assert refused, "ranks with unequal frozen sets went on"


def check_a_poisoned_loss_is_known_to_all(world: World) -> None:
    parts = Parts(world)
    parts.step()
    parts.step(poison=world.rank == world.size - 1)
    assert parts.signals.nonfinite == 1
    assert not parts.reducer.gradients_are_finite()
