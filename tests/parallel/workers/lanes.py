"""Every rank tries what moves between ranks: worlds of some ranks, the mesh, large transfers, and the wire."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import hvfreeze.comm.horovod_world as horovod_world
import hvfreeze.comm.point_to_point as wire_module
from hvfreeze.comm.mesh import Mesh, open_line, open_mesh
from hvfreeze.comm.point_to_point import Wire, open_wire
from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import World
from hvfreeze.errors import DivergedError
from tests.parallel.workers.own_optimizer import raises

LANES = ("activations", "errors")


def try_collectives(world: World, members: list[int], name: str) -> None:
    """Try every method of a world whose ranks are `members` of the job."""
    assert world.size == len(members) and 0 <= world.local_rank < world.local_size <= world.size
    mine = torch.arange(5, dtype=torch.float64) + members[world.rank]
    expected = sum(torch.arange(5, dtype=torch.float64) + member for member in members)
    assert torch.equal(world.allreduce_sum(mine, name=f"{name}.sum"), expected)
    assert world.allgather_object(members[world.rank], name=f"{name}.all") == members
    for root in range(world.size):
        assert world.broadcast_object(members[world.rank], name=f"{name}.one", root=root) == members[root]
        tensor = torch.full((3, 2), float(members[world.rank]))
        world.broadcast_(tensor, name=f"{name}.tensor", root=root)
        assert tensor.tolist() == [[members[root]] * 2] * 3
    sent = [(torch.arange(3000 * place) % 251).to(torch.uint8) for place in range(world.size)]
    gathered = world.gather_bytes(sent[world.rank], name=f"{name}.gather")
    assert len(gathered) == (world.size if world.rank == 0 else 0)
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(gathered, sent))
    dealt = world.scatter_bytes(sent if world.rank == 0 else [], name=f"{name}.scatter")
    assert torch.equal(dealt, sent[world.rank])
    world.barrier(name=f"{name}.barrier")

    weight = nn.Parameter(torch.zeros(4))
    reducer = Reducer(world)
    reducer.carry([("weight", weight)])
    reducer.begin()
    (weight * float(members[world.rank])).sum().backward()  # type: ignore[no-untyped-call]
    reducer.finish()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((4,), sum(members) / len(members)), rtol=1e-6, atol=0)


def samples() -> list[Tensor]:
    """Tensors of every type that travels, small, empty, larger than any limit below which MPI just sends, odd bits."""
    torch.manual_seed(1)
    large = torch.randn(5 * 2**20)
    bits = torch.randint(-(2**31), 2**31, (1000,), dtype=torch.int64).to(torch.int32)
    types = [torch.float16, torch.bfloat16, torch.int64, torch.uint8]
    return [
        large,
        large[: 2**20].view(4, -1),
        bits.view(torch.float32),
        torch.randn(0, 3),
        *[(torch.randn(7, 5) * 100).to(dtype) for dtype in types],
        torch.randn(6, 4).t(),
    ]


def try_the_wire(world: World, wire: Wire) -> None:
    """Put everything to the next rank, and as errors to the rank before, before anything is received."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    tensors = samples()
    handle = world.start_allreduce_(torch.ones(2**16), name="beside")
    wire.expect(tensors[0].shape, dtype=tensors[0].dtype, source=before, lane="activations")
    for tensor in tensors:
        wire.put(tensor, to=after, lane="activations")
        wire.put(tensor.neg() if tensor.dtype != torch.uint8 else tensor, to=before, lane="errors")
    for tensor in tensors:
        came = wire.get(tensor.shape, dtype=tensor.dtype, source=before, lane="activations")
        back = wire.get(tensor.shape, dtype=tensor.dtype, source=after, lane="errors")
        assert same_bits(came, tensor), "other bits, or another order"
        assert same_bits(back, tensor.neg() if tensor.dtype != torch.uint8 else tensor), "lanes meet"
    world.wait(handle)
    for seq in (3, 40_000, 1):
        wire.put(torch.full((2,), float(seq)), to=after, lane="activations", seq=seq)
    for seq in (1, 3, 40_000):
        assert wire.get((2,), source=before, lane="activations", seq=seq).tolist() == [seq, seq], "numbers are mixed"
    wire.drain()
    held = [wire.get(t.shape, dtype=t.dtype, source=after, lane="errors") for t in put_again(wire, tensors, before)]
    assert all(same_bits(a, b) for a, b in zip(held, tensors[1:], strict=True)), "a buffer was used twice"
    wire.drain()
    for length in (3, 5):
        wire.put(torch.zeros(4), to=after, lane="activations")
        get = partial(wire.get, (length,), source=before, lane="activations")
        raises(DivergedError, "lane activations", get)
    wire.drain()


def put_again(wire: Wire, tensors: list[Tensor], to: int) -> list[Tensor]:
    for tensor in tensors[1:]:
        wire.put(tensor, to=to, lane="errors")
    return tensors[1:]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def see_what_is_counted(world: World, wire: Wire) -> None:
    lane = wire.counts["errors"]
    total = sum(t.nbytes for t in samples()) + sum(t.nbytes for t in samples()[1:])
    assert lane.bytes_sent == total
    assert lane.wait_seconds > 0


def check_the_wire(world: World) -> None:
    wire = open_wire(world, LANES)
    try_the_wire(world, wire)
    see_what_is_counted(world, wire)
    wire.close()


def check_nothing_is_left_behind(world: World) -> None:
    before, wire_module.PIECE_BYTES = wire_module.PIECE_BYTES, 2**20 + 1
    try:
        wire = open_wire(world, LANES)
        try_the_wire(world, wire)
        wire.expect((4,), dtype=torch.float32, source=(world.rank + 1) % world.size, lane="errors")
        wire.put(torch.ones(2**21), to=(world.rank + 1) % world.size, lane="activations")
        got = wire.get((2**21,), source=(world.rank - 1) % world.size, lane="activations")
        assert float(got.sum()) == 2**21
        wire.close()
        wire.close()
    finally:
        wire_module.PIECE_BYTES = before


def check_worlds_of_some_ranks(world: World) -> None:
    everybody = list(range(world.size))
    assert world.among(everybody[::-1]) is world
    sets = [everybody[1:], everybody[::2], everybody[-1:], everybody[1:]]
    for number, members in enumerate(members for members in sets if members):
        part = world.among(members)
        assert (part is None) == (world.rank not in members)
        if part is not None:
            try_collectives(part, members, f"set{number}")
        try_collectives(world, everybody, f"all{number}")


def check_large_transfers_go_in_pieces(world: World) -> None:
    before, horovod_world.PIECE_BYTES = horovod_world.PIECE_BYTES, 4096
    try:
        try_collectives(world, list(range(world.size)), "pieces")
        root = world.size - 1
        tensor = torch.arange(20_000, dtype=torch.int64).view(100, 200) * (world.rank == root)
        world.broadcast_(tensor, name="pieces.large", root=root)
        assert torch.equal(tensor, torch.arange(20_000).view(100, 200))
    finally:
        horovod_world.PIECE_BYTES = before


def check_the_mesh(world: World) -> None:
    plain = Mesh(world)
    assert (plain.partition, plain.replica, plain.replicas) == (0, world.rank, world.size)
    assert plain.replica_world is world and plain.before is None and plain.after is None
    for partitions in (each for each in range(1, world.size + 1) if world.size % each == 0):
        mesh = open_mesh(world, partitions=partitions)
        assert world.rank == mesh.replica * partitions + mesh.partition == mesh.rank_of(mesh.partition)
        assert mesh.rank_of(0, replica=mesh.replicas - 1) == world.size - partitions
        peers, line = mesh.replica_world, open_line(mesh)
        names = peers.allgather_object((mesh.partition, mesh.replica), name=f"mesh{partitions}.{mesh.partition}")
        assert names == [(mesh.partition, replica) for replica in range(mesh.replicas)]
        names = line.allgather_object((mesh.partition, mesh.replica), name=f"line{partitions}.{mesh.replica}")
        assert names == [(partition, mesh.replica) for partition in range(partitions)]
        assert (mesh.before is None) == (mesh.partition == 0)
        assert mesh.after is None or mesh.rank_of(mesh.partition + 1) == mesh.after


def check_the_wire_after_horovod_has_started_anew(world: World) -> None:
    check_the_wire(world)
