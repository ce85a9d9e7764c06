"""Shared memory of the ranks on a node, so that data that all of them read exists once.

It is an unnamed file: it is not limited by /dev/shm, which is often small in containers, and it disappears with the
last process that maps it.
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
    """The ranks of a job on this machine that read the same place, and the machine's name."""

    host: str
    ranks: tuple[int, ...]
    """Rank numbers, ascending, including this rank."""
    place: int
    """Index of this rank in `ranks`."""
    shared: bool
    """True if any node of the job has several such ranks; equal on all ranks."""


def node_of(world: World, *, reads: str = "") -> Node:
    """Return the ranks that share this rank's machine and read from the same place. Collective."""
    here = (socket.gethostname(), reads)
    places = world.allgather_object(here, name="node")
    ranks = tuple(rank for rank, other in enumerate(places) if other == here)
    return Node(here[0], ranks, ranks.index(world.rank), shared=len(set(places)) < len(places))


def share_memory(world: World, node: Node, count: int, *, name: str) -> tuple[NDArray[np.uint8] | None, str]:
    """Return shared memory of the ranks of a node, and the reason if a node cannot share memory. Collective.

    Args:
        world: all ranks.
        node: the node of this rank.
        count: bytes, taken from the first rank of a node. 0 asks for none.
        name: the same on all ranks.

    Returns:
        (count,) zeros, writable until `protect`, or None if none was asked for, the node has one rank, or the system
        refuses; and an empty text, or on all ranks the first reason of any node.
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
    """Make memory of `share_memory` read-only for this rank, because a stray write would change it for all ranks."""
    read_only = ctypes.c_int(mmap.PROT_READ)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), read_only)


@contextmanager
def _offered(count: int) -> Iterator[tuple[str, str] | None]:
    """Keep a new file of `count` bytes open for others to map; yield its path and name, or "" and why it failed."""
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
    """Return the memory behind an offer, or the reason why it cannot be mapped."""
    if offer is None:
        return None, ""
    place, name = offer
    if not place:
        return None, name
    try:
        # Where ranks do not see each other's processes, the number may be that of another process.
        if name not in os.readlink(place):
            return None, "its ranks cannot see each other's processes"
        file = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(file, 0), dtype=np.uint8), ""
        finally:
            os.close(file)
    except OSError as error:
        return None, str(error)
