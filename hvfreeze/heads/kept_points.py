"""Points of a rank's rows kept in a cache directory: the next run with equal features begins with the solver.

A file a rank, of the cache's own format: a row for each sample's view that was used, `MOST_DIRECTIONS` numbers at most.
Behind the samples' keys stand those of P^T, a row a feature, and of p, by which points are made (`points.OwnPoints`),
and of their number.
What points depend on beside a rank's own rows, all ranks' rows and how they are dealt out, is in the fingerprint.

A solver that is stopped lies beside them, until it is done.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvfreeze.cache.faults import CacheFault
from hvfreeze.cache.file.disk import Budget
from hvfreeze.cache.file.format import Keys, pack_keys
from hvfreeze.cache.fingerprint import JSON, Fingerprint, canonical, digest_tensors
from hvfreeze.cache.store import MOST_DIFFERENT, Store
from hvfreeze.comm.world import World
from hvfreeze.files import open_new, replace_file
from hvfreeze.heads.gram import Iterate
from hvfreeze.heads.points import DISTANCE, MOST_DIRECTIONS, WHITENED, OwnPoints
from hvfreeze.heads.rows import CHUNK_ROWS, RowsOfBatches
from hvfreeze.plain_load import load_plain

FOLDER = "points"
"""In the cache directory."""
BEHIND = 2**46
"""The sample id of the first row that is no sample's."""
VERSION = 1
"""Of how points are made; to be counted up where that changes."""


@dataclass(frozen=True)
class PointStore:
    """Where points may be kept.

    Attributes:
        directory: of the cache.
        features: the fingerprint of the rows' features.
        stop: whether a fault of the cache ends the run, and does not only leave points unkept.
        private: refuse files that are not this user's own.
        budget: pays for the file.
        owner: names the run.
        say: tells the user a line; does nothing but on rank 0.
    """

    directory: Path
    features: Fingerprint
    stop: bool
    private: bool
    budget: Budget
    owner: str
    say: Callable[[str], None]


class _Found(NamedTuple):
    points: Tensor
    """(B, K), of the rows that are used."""
    used: Tensor
    """(rows,) bool."""
    matrix: Tensor
    shift: Tensor


class StoppedSolver:
    """A solver that was stopped, in a file whose name says what it solves; a damaged file is none."""

    def __init__(self, path: Path, rows: int, say: Callable[[str], None]) -> None:
        self._path, self._rows, self._say = path, rows, say

    def load(self, columns: int) -> Iterate | None:
        """Return from where to go on with so many right sides, None where nothing is kept."""
        shapes = [(self._rows, columns)] * 3 + [(columns,)] * 2
        try:
            *tensors, steps = load_plain(self._path)
            assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == [
                (shape, torch.float64) for shape in shapes
            ] and type(steps) is int
        except FileNotFoundError:
            return None
        # Whatever the unpickler raises.
        except Exception:
            self._say(f"{self._path} is damaged: the solver begins anew")
            return None
        self._say(f"the solver goes on after {steps} steps")
        return Iterate._make([*tensors, steps])

    def keep(self, iterate: Iterate) -> None:
        """Write from where to go on; where that cannot be done, the next run begins anew."""
        # Another job may be solving the same, in the same directory.
        temporary = self._path.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            with open(open_new(temporary), "wb") as file:
                torch.save([*iterate], file)
                file.flush()
                replace_file(file.fileno(), temporary, self._path)
        # `torch.save` raises RuntimeError where a disk is full.
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                temporary.unlink()
            self._say(f"{self._path} cannot be written ({error}): a resumed run begins its solver anew")

    def remove(self) -> None:
        """Remove what is kept, and what jobs that were killed in writing it have left."""
        for path in (self._path, *self._path.parent.glob(f"{self._path.stem}.*.part")):
            path.unlink(missing_ok=True)


class KeptPoints:
    """The points of one rank's `rows`, read if they are kept and kept when they are made."""

    def __init__(self, rows: RowsOfBatches, store: PointStore, *, world: World) -> None:
        """Find out whose points these are. Collective."""
        self._rows, self._store, self._world, self._fault = rows, store, world, ""
        views, bare = rows.bare()
        self._marks = bare.marks()
        self._keys = pack_keys(bare.samples, views)
        mine = digest_tensors([("keys", torch.from_numpy(self._keys)), ("marks", self._marks)])
        everyones = world.allgather_object(mine, name="points.rows")
        made: dict[str, JSON] = {
            "version": VERSION,
            "directions": MOST_DIRECTIONS,
            "whitened": WHITENED,
            "distance": DISTANCE,
        }
        made |= {"rows": hashlib.sha256("".join(everyones).encode()).hexdigest(), "sampled": rows.sample() is not None}
        # Points of other bits would make another head.
        self._fingerprint = Fingerprint.of(
            {**store.features.fields, **store.features.exactness, "points": made}, exactness={"batch": CHUNK_ROWS}
        )

    def load(self) -> OwnPoints | None:
        """Return the points where every rank has kept its own, of the same making; else None. Collective.

        Raises:
            CacheFault: a file cannot be used, and the store says that this ends the run; on all ranks.
        """
        found, fault = None, ""
        try:
            found = self._read()
        except CacheFault as error:
            fault = str(error)
        made = digest_tensors([("P", found.matrix), ("p", found.shift)]) if found else ""
        told = self._world.allgather_object((made, fault, self._left_out(found)), name="points.found")
        faults = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(told) if why]
        if faults:
            self._fault = faults[0]
            self._give_up()
        if found is None or len({theirs for theirs, _, _ in told}) > 1 or faults:
            return None
        samples = sorted({sample for _, _, theirs in told for sample in theirs})
        self._store.say("the points of all rows are kept: no features are computed for them")
        return OwnPoints(
            found.points, self._marks[:, found.used], found.used, found.matrix, found.shift, tuple(samples), 0
        )

    def keep(self, mine: OwnPoints) -> None:
        """Keep points that were made. Collective.

        Raises:
            CacheFault: they cannot be kept, and the store says that this ends the run; on all ranks.
        """
        if self._fault:
            return
        try:
            self._write(mine)
        except CacheFault as error:
            self._fault = str(error)
        told = self._world.allgather_object(self._fault, name="points.kept")
        faults = [f"rank {rank}: {why}" for rank, why in enumerate(told) if why]
        if faults:
            self._fault = faults[0]
            self._give_up()

    def solver(self, right: Tensor, problem: dict[str, JSON]) -> StoppedSolver:
        """Return where a solver for the right sides (M, C) is kept when it is stopped. Not a collective: rank 0's."""
        digest = digest_tensors([(self._fingerprint.digest + canonical(problem), right)])
        return StoppedSolver(self._store.directory / FOLDER / f"solver-{digest[:16]}.pt", len(right), self._store.say)

    def _give_up(self) -> None:
        if self._store.stop:
            raise CacheFault(self._fault).on_all_ranks()
        self._store.say(f"points are not kept: {self._fault}")

    def _left_out(self, found: _Found | None) -> Sequence[int]:
        return [] if found is None else sorted(set(self._marks[0, ~found.used].tolist()))

    @cached_property
    def _making(self) -> Keys:
        """The keys of P^T, p and a row with the number of points, (D + 2,)."""
        # No two ranks' are the same: a store also reads the files of others.
        count = self._rows.width + 2
        return pack_keys(BEHIND + self._world.rank * count + np.arange(count), np.zeros(count, np.int64))

    def _open(self) -> Store:
        store, world = self._store, self._world
        return Store(
            store.directory / FOLDER,
            self._fingerprint,
            np.sort(np.concatenate([self._keys, self._making])),
            shard=f"{world.rank}of{world.size}",
            batch_rows=CHUNK_ROWS,
            private=store.private,
            budget=store.budget,
            owner=store.owner,
        )

    def _read(self) -> _Found | None:
        with closing(self._open()) as store:
            if store.missing(self._making).any():
                return None
            store.verify_share(0, 1)
            used = ~store.missing(self._keys)
            making = self._rows_of(store, self._making)
            points = self._rows_of(store, self._keys[used], width=making.shape[1])
        if int(making[-1, 0]) != len(points):
            raise CacheFault(f"points in {self._store.directory / FOLDER} are not whole; remove them")
        matrix, shift = making[:-2].t().contiguous(), making[-2].clone()
        found = _Found(points, torch.from_numpy(used), matrix, shift)
        self._compare(found)
        return found

    def _rows_of(self, store: Store, keys: Keys, *, width: int = 0) -> Tensor:
        whole = torch.zeros(len(keys), width)
        for start in range(0, len(keys), CHUNK_ROWS):
            place = store.locate(keys[start : start + CHUNK_ROWS])
            assert place is not None, "they are there"
            part = store.read_at(place)
            if not whole.shape[1]:
                whole = torch.zeros(len(keys), part.shape[1])
            whole[start : start + len(part)] = part
        return whole

    def _compare(self, found: _Found) -> None:
        """Refuse points that are not those of the first batch's features, whatever the fingerprint says."""
        features = self._rows.first_features().float()
        used = found.used[: len(features)]
        made = torch.addmm(found.shift, features[used], found.matrix.t())
        theirs = found.points[: len(made)]
        if len(made) and not float((made - theirs).norm() / made.norm().clamp(min=1e-30)) <= MOST_DIFFERENT:
            raise CacheFault(
                f"points in {self._store.directory / FOLDER} are not what this run computes, though their fingerprint "
                "says so; remove them or give another --cache-dir"
            )

    def _write(self, mine: OwnPoints) -> None:
        keys = np.concatenate([self._keys[mine.used.numpy()], self._making])
        with closing(self._open()) as store:
            if not store.missing(self._making).any():
                return
            making = torch.cat([mine.matrix.t(), mine.shift[None], torch.full_like(mine.shift, len(mine.points))[None]])
            done = 0
            for part in (*mine.points.split(CHUNK_ROWS), *making.split(CHUNK_ROWS)):
                store.append(keys[done : done + len(part)], part.contiguous())
                done += len(part)
