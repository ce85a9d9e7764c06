from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from hvfreeze.comm import horovod_world, mpi_environment
from hvfreeze.comm.mpi_environment import ALLREDUCE_RULES, TCP_MESSAGE_BYTES, may_read_memory, tune_open_mpi

ALLREDUCE, RING = 2, 4
LARGE, SMALL = 4 << 20, 1 << 10


def numbers() -> Iterator[int]:
    for line in ALLREDUCE_RULES.read_text().splitlines():
        yield from map(int, line.partition("#")[0].split())


def rules() -> dict[int, dict[int, int]]:
    """The file as Open MPI reads it: ranks and more -> bytes and more -> algorithm, 0 for its own choice."""
    found = numbers()
    assert (next(found), next(found)) == (1, ALLREDUCE)
    table: dict[int, dict[int, int]] = {}
    for _ in range(next(found)):
        ranks = table.setdefault(next(found), {})
        for _ in range(next(found)):
            size, algorithm, fan_in, segment = (next(found) for _ in range(4))
            assert (fan_in, segment) == (0, 0)
            ranks[size] = algorithm
    assert list(found) == []
    return table


def algorithm(ranks: int, size: int) -> int:
    table = rules()
    known = [start for start in table if start <= ranks]
    by_size = table[max(known)] if known else {0: 0}
    return by_size[max(start for start in by_size if start <= size)]


@pytest.mark.parametrize("ranks", [2, 3, 63, 64])
def test_the_ring_is_taken_for_long_messages_of_three_to_63_ranks(ranks: int) -> None:
    assert algorithm(ranks, LARGE) == (RING if 3 <= ranks < 64 else 0)
    assert algorithm(ranks, SMALL) == 0


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"OMPI_MCA_btl_tcp_eager_limit": "65536", "OMPI_MCA_coll_tuned_use_dynamic_rules": "0"}
    found = dict(held)
    monkeypatch.setattr(os, "environ", found)
    tune_open_mpi()
    assert {name: found[name] for name in held} == held
    assert found["OMPI_MCA_btl_tcp_max_send_size"] == str(TCP_MESSAGE_BYTES)
    assert "OMPI_MCA_coll_tuned_dynamic_rules_filename" not in found


@pytest.mark.parametrize(("allowed", "held"), [(True, None), (False, None), (False, "cma")])
def test_ranks_read_from_each_other_unless_the_kernel_forbids_it(
    allowed: bool, held: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "OMPI_MCA_btl_vader_single_copy_mechanism"
    found = {} if held is None else {name: held}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(mpi_environment, "may_read_memory", lambda: allowed)
    tune_open_mpi()
    assert found.get(name) == (held if allowed or held else "none")


@pytest.mark.parametrize("answer", [1, -1, None])
def test_the_kernel_is_asked_by_reading_a_byte(answer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace() if answer is None else SimpleNamespace(process_vm_readv=lambda *args: answer)
    monkeypatch.setattr(mpi_environment.ctypes, "CDLL", lambda name: library)
    assert may_read_memory() == (answer == 1)


def test_every_world_of_several_ranks_is_tuned_before_mpi_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {"OMPI_COMM_WORLD_LOCAL_SIZE": "999"}

    def begin() -> None:
        assert found["OMPI_MCA_coll_tuned_dynamic_rules_filename"] == str(ALLREDUCE_RULES)
        assert found["OMPI_MCA_mpi_yield_when_idle"] == "1"
        raise ImportError("here")

    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setitem(sys.modules, "horovod.torch", ModuleType("horovod.torch"))
    monkeypatch.setattr(horovod_world, "start_mpi", begin)
    with pytest.raises(ImportError, match="here"):
        horovod_world.HorovodWorld()
