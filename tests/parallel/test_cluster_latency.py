from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.mpirun import ROOT
from tests.parallel.nodes import launch, scratch, state, up, wait_until

CLUSTER = str(ROOT / "launch/cluster")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch() as path:
        yield path


def test_a_message_takes_the_latency_that_was_asked_for_and_every_byte_arrives(folder: Path) -> None:
    latency, count = 0.02, 5_000_000
    with up("cluster", "--nodes", "2", "--latency", "20ms", "--bandwidth", "1gbit") as nodes:
        ask = (
            "import socket, time; start = time.monotonic(); socket.create_connection(('node1', 22)); "
            "print(time.monotonic() - start)"
        )
        done = nodes.run(sys.executable, "-c", ask)
        assert done.returncode == 0, done.stderr
        # There and back; without the wires' delay it takes a hundredth of that.
        assert float(done.stdout) >= 2 * latency
        source = folder / "sent"
        source.write_bytes(os.urandom(count))
        assert nodes.run("sh", "-c", f"ssh node1 'cat > $TMPDIR/sent' < {source}").returncode == 0
        received = nodes.run("ssh", "node1", "sha256sum $TMPDIR/sent").stdout.split()[0]
    assert received == hashlib.sha256(source.read_bytes()).hexdigest()


def test_a_node_whose_wire_ends_is_dead_and_the_others_are_not() -> None:
    with up("cluster", "--nodes", "2", "--latency", "1ms") as nodes:
        found = state(nodes.name)
        assert found["latency"] == 1e-3
        wires = [child for child in children(found["supervisor"]) if carries_frames(child)]
        assert len(wires) == 2
        os.kill(max(wires), signal.SIGKILL)
        wait_until(lambda: 0 in [node["pid"] for node in state(nodes.name)["nodes"]], what="a node is dead")
        assert [bool(node["pid"]) for node in state(nodes.name)["nodes"]] == [True, False]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def carries_frames(pid: int) -> bool:
    return any(os.readlink(descriptor) == "/dev/net/tun" for descriptor in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("latency", ["0ms", "1.5s", "fast", "-1ms"])
def test_a_latency_that_is_none_is_refused(latency: str) -> None:
    done = launch([CLUSTER, "up", f"--latency={latency}"])
    assert done.returncode == 2
    assert "is no time up to a second: 100us, 0.5ms, ..." in done.stderr
