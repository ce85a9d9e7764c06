"""Jobs of ranks that stay, and make one check after another: a check starts no Python, no PyTorch and no MPI.

One job stands at a time; another number of ranks, or another start, ends it. After a check that failed or hung, or left
something behind, the next one gets a job of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.parallel.mpirun import GRACE_SECONDS, ROOT, Result, command_of, end_all, environment, launch, processes_of

PROGRAM = Path(__file__).with_name("rank.py")
DEADLINE_SECONDS = 150.0
"""For a check, on a machine that has other work too; more than any needs, and less than pytest's own limit."""
START_SECONDS = 120.0
PATIENCE_SECONDS = 10.0
"""How long the others have to end, once a check has failed on one rank."""


class Job:
    """Ranks that wait for checks."""

    def __init__(self, size: int, start: str) -> None:
        """Start `size` ranks, whose world is opened as `start` says; see rank.py."""
        self.size, self.start, self.number = size, start, 0
        self.folder = Path(tempfile.mkdtemp(prefix="hvfreeze-ranks-"))
        self.output, self.read = self.folder / "output", 0
        address = str(self.folder / "socket")
        variables = environment({"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}, out=self.folder)
        with socket.socket(socket.AF_UNIX) as listener, self.output.open("wb") as output:
            listener.bind(address)
            listener.listen(size)
            self.launcher = subprocess.Popen(
                [*launch(size), sys.executable, str(PROGRAM), address, start],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
            )
            self.links, self.pids = self._meet(listener)

    def _meet(self, listener: socket.socket) -> tuple[list[socket.socket], list[int]]:
        listener.settimeout(1.0)
        deadline, met = time.monotonic() + START_SECONDS, {}
        while len(met) < self.size:
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"{len(met)} of {self.size} ranks have started\n{self.said()}")
            with contextlib.suppress(TimeoutError):
                link, _ = listener.accept()
                link.settimeout(None)
                hello = json.loads(_line(link))
                met[hello["rank"]] = link, hello["pid"]
        return [met[rank][0] for rank in range(self.size)], [met[rank][1] for rank in range(self.size)]

    def call(self, part: str, check: str, *, deadline: float, arguments: dict[str, Any]) -> tuple[list[Any], str]:
        """Let every rank call a check.

        Returns:
            The values by rank, and why the check does not hold; empty where it does.
        """
        self.number += 1
        folder, root = (self.folder / f"{name}{self.number}" for name in ("check", "root"))
        folder.mkdir()
        root.mkdir()
        request = {"part": part, "check": check, "root": str(root), "folder": str(folder), "arguments": arguments}
        answers = self._ask(request, deadline)
        failures = [self._ended(rank, deadline) for rank in range(self.size) if rank not in answers]
        failures += [f"rank {rank}:\n{answer['error']}" for rank, answer in answers.items() if "error" in answer]
        if not failures:
            left = [f"rank {rank} left {what}" for rank, answer in answers.items() for what in answer["left"]]
            left += [f"left a file: {path.name}" for path in folder.iterdir()]
            left += [f"left a process: {command}" for command in self._children()]
            failures = left
        for path in (folder, root):
            shutil.rmtree(path, ignore_errors=True)
        if failures:
            failures.append(self.said())
        return [answers.get(rank, {}).get("value") for rank in range(self.size)], "\n".join(failures)

    def _ask(self, request: dict[str, Any], deadline: float) -> dict[int, dict[str, Any]]:
        """Return the ranks' answers; of a rank that has none in time, its stacks are in the output."""
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as waiting:
            for rank, link in enumerate(self.links):
                link.sendall(json.dumps(request).encode() + b"\n")
                waiting.register(link, selectors.EVENT_READ, rank)
            answers: dict[int, dict[str, Any]] = {}
            until = time.monotonic() + deadline
            while waiting.get_map() and (ready := waiting.select(max(0.0, until - time.monotonic()))):
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    line = _line(self.links[key.data])
                    if line:
                        answers[key.data] = json.loads(line)
                    if not line or "error" in answers[key.data]:
                        until = min(until, time.monotonic() + PATIENCE_SECONDS)
        for rank in set(range(self.size)) - set(answers):
            # Python's fault handler writes the stacks of all threads, wherever they wait.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGABRT)
        return answers

    def _ended(self, rank: int, deadline: float) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(GRACE_SECONDS)
        return f"rank {rank} did not come to the end of the check, which has {deadline:.0f} s, or ended"

    def _children(self) -> list[str]:
        known = {*self.pids, self.launcher.pid}
        return [command for pid in processes_of(self.folder) - known if (command := command_of(pid))]

    def said(self) -> str:
        """Return the end of what the ranks have printed since this was last asked."""
        with self.output.open("rb") as file:
            file.seek(self.read)
            said = file.read()
            self.read = file.tell()
        return said.decode(errors="replace")[-12_000:]

    def end(self) -> None:
        """End the job, and everything that it started."""
        for link in getattr(self, "links", ()):
            link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(GRACE_SECONDS / 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()
        end_all(processes_of(self.folder), grace_seconds=0)


def _line(link: socket.socket) -> str:
    """Return the next line that a rank has written, empty where it has ended."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            more = link.recv(65536)
        except ConnectionResetError:
            more = b""
        if not more:
            return ""
        line += more
    return line.decode()


_standing: list[Job] = []


def end() -> None:
    """End the job that stands, if there is one."""
    while _standing:
        job = _standing.pop()
        job.end()
        shutil.rmtree(job.folder, ignore_errors=True)


def call(
    size: int,
    part: str,
    check: str,
    *,
    start: str = "",
    deadline: float = DEADLINE_SECONDS,
    **arguments: Any,
) -> list[Any]:
    """Let `size` ranks call a worker's check, and return its values by rank.

    Args:
        size: Number of ranks.
        part: The worker, and a word for it; see rank.py.
        check: Name of the function.
        start: What opens the ranks' world.
        deadline: Seconds after which the check has failed.
        arguments: What the function is called with beside its setting; JSON.

    Raises:
        AssertionError: the check does not hold on some rank, hangs, or leaves a process, a port or a file behind.
    """
    if not _standing or (_standing[0].size, _standing[0].start) != (size, start):
        end()
        _standing.append(Job(size, start))
    values, failure = _standing[0].call(part, check, deadline=deadline, arguments=arguments)
    if failure:
        end()
    assert not failure, f"{part} {check} on {size} ranks:\n{failure}"
    return values


def hvfreeze(
    size: int, *words: str, each: list[list[str]] | None = None, program: str = "program", **variables: str
) -> Result:
    """Run `hvfreeze WORDS` on the ranks of a standing job.

    Args:
        size: Number of ranks.
        words: The command line.
        each: More words for each rank.
        program: The worker that runs it.
        variables: Of the environment.

    Returns:
        The exit code, equal on all ranks, and what all ranks printed, rank 0 first.
    """
    given = [[*words, *(each[rank] if each else ())] for rank in range(size)]
    folder = str(ROOT)
    found = call(size, program, "run", commands=given, variables=variables, folder=folder)
    (code,) = {rank["code"] for rank in found}
    stdout, stderr = ("".join(rank[name] for rank in found) for name in ("stdout", "stderr"))
    return Result(code, stdout, stderr, [])
