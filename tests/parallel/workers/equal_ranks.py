"""What `invariants` checks of what ranks have in common: models, bytes and data."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import hvfreeze.ranks.horovod_world
from hvfreeze.config.sections import DataConfig
from hvfreeze.data.sets.opening import open_data
from hvfreeze.errors import DivergedError
from hvfreeze.ranks import agreement, equal_models
from hvfreeze.ranks.equal_models import parameter_digest
from hvfreeze.ranks.world import World
from hvfreeze.training.making import samples
from tests.program import save_photos


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
    usual = equal_models.PACKED_BYTES
    for size in (1, 100, usual):
        torch.manual_seed(world.rank)
        model = Odd(world.rank)
        equal_models.PACKED_BYTES = size
        equal_models.broadcast_model(model, world)
        digests = world.allgather_object(parameter_digest(model), name="test.digests")
        assert len(set(digests)) == 1, f"models differ where {size} bytes travel together"
        torch.manual_seed(0)
        assert world.rank > 0 or digests[0] == parameter_digest(Odd(0)), "rank 0's model has changed"
    equal_models.PACKED_BYTES = usual


def check_models_that_cannot_become_equal_are_refused_by_all(world: World) -> None:
    last = world.rank == world.size - 1 > 0
    # As many bytes on all ranks, so that nothing but the names could tell.
    model = nn.ModuleDict({"theirs" if last else "ours": nn.Linear(3, 2)})
    try:
        equal_models.broadcast_model(model, world)
    except DivergedError as error:
        assert f"the model of rank {world.size - 1} has other parameters" in str(error), str(error)
        assert world.size > 1
    else:
        assert world.size == 1, "a model with other names was accepted"


def check_every_ranks_bytes_arrive_whole_at_rank_0(world: World) -> None:
    before, hvfreeze.ranks.horovod_world.PIECE_BYTES = hvfreeze.ranks.horovod_world.PIECE_BYTES, 4096
    try:
        sent = [torch.arange(3000 * rank, dtype=torch.int64).to(torch.uint8) for rank in range(world.size)]
        received = world.gather_bytes(sent[world.rank], name="test.bytes")
    finally:
        hvfreeze.ranks.horovod_world.PIECE_BYTES = before
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
    world.barrier(name="test.photos")
    looks, look = [], samples.list_data
    samples.list_data = lambda *of: looks.append(of) or look(*of)  # type: ignore[attr-defined,func-returns-value]
    try:
        data = DataConfig(data="imagefolder", data_dir=folder)
        options = {"seed": 0, "batch_size": 2, "replicas": world.size, "whole_batches": True}
        corpus = samples.open_corpus(data, world, **options)  # type: ignore[arg-type]
    finally:
        samples.list_data = look  # type: ignore[attr-defined]
    assert world.allgather_object(len(looks), name="test.looks") == [1] + [0] * (world.size - 1)
    alone = open_data("imagefolder", folder)
    for mine, theirs in ((corpus.train, alone.train), (corpus.evaluated, alone.test)):
        assert mine.identity() == theirs.identity() and mine.classes == theirs.classes
        assert (mine.decode(3) == theirs.decode(3)).all() and torch.equal(mine.labels, theirs.labels)
    world.barrier(name="test.seen")
    if world.rank == 0:
        shutil.rmtree(folder)
