"""Memory that the ranks of a node see together, so that what all of them read is there once.

It is a file without a name: it has no place that could be too small, as /dev/shm often is in containers, and it is gone
with the last process that has it, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvfreeze.comm.world import World


@dataclass(frozen=True)
class Node:
    """The ranks of a job that run on this machine, by its name, and read the same there."""

    host: str
    ranks: tuple[int, ...]
    """Ascending; this one is among them."""
    place: int
    """This rank's, in `ranks`."""
    shared: bool
    """Whether the job has any such ranks beside each other; the same on all ranks."""


def node_of(world: World, *, reads: str = "") -> Node:
    """Return the ranks that share this rank's machine, and read from the same place there. Collective."""
    here = (socket.gethostname(), reads)
    places = world.allgather_object(here, name="node")
    ranks = tuple(rank for rank, other in enumerate(places) if other == here)
    return Node(here[0], ranks, ranks.index(world.rank), shared=len(set(places)) < len(places))


def share_memory(world: World, node: Node, count: int, *, name: str) -> tuple[NDArray[np.uint8] | None, str]:
    """Return memory that the ranks of a node share, and why one of the job's nodes cannot share any. Collective.

    Args:
        world: all ranks.
        node: this rank's.
        count: bytes; the first rank's of a node counts. 0 asks for none.
        name: the same on all ranks.

    Returns:
        (count,) zeros, writable until `protect`; None where none was asked for, the node has one rank, or the system
        refuses it. And an empty text, or on all ranks the first refusal of any node.
    """
    leads = node.place == 0 and count > 0 and len(node.ranks) > 1
    with _offered(count if leads else 0) as offer:
        offers: list[tuple[str, str] | None] = world.allgather_object(offer, name=f"{name}.offers")
        if not any(offers):
            return None, ""
        found, refusal = _taken(offers[node.ranks[0]])
        refusals = world.allgather_object(refusal and f"{node.host}: {refusal}", name=f"{name}.refusals")
    if any(refusals[rank] for rank in node.ranks):
        found = None
    return found, next(filter(None, refusals), "")


def protect(memory: NDArray[np.uint8]) -> None:
    """Make memory of `share_memory` read-only for this rank: who writes to it by mistake would do so for all ranks."""
    read_only = ctypes.c_int(mmap.PROT_READ)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), read_only)


@contextmanager
def _offered(count: int) -> Iterator[tuple[str, str] | None]:
    """Hold a new file of `count` bytes open for others to take: where it is, and its name, or "" and why it is not."""
    if count == 0:
        yield None
        return
    name = f"hvfreeze-{secrets.token_hex(16)}"
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError) as error:
        yield "", str(error)
        return
    try:
        try:
            os.ftruncate(file, count)
        except OSError as error:
            yield "", str(error)
        else:
            yield f"/proc/{os.getpid()}/fd/{file}", name
    finally:
        os.close(file)


def _taken(offer: tuple[str, str] | None) -> tuple[NDArray[np.uint8] | None, str]:
    """Return the memory behind an offer, or why it cannot be had."""
    if offer is None:
        return None, ""
    place, name = offer
    if not place:
        return None, name
    try:
        # Where ranks do not see each other's processes, the number may be that of another process.
        if name not in os.readlink(place):
            return None, "its ranks do not see each other's processes"
        file = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(file, 0), dtype=np.uint8), ""
        finally:
            os.close(file)
    except OSError as error:
        return None, str(error)
