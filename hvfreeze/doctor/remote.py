"""The probe of a node; this file is sent over ssh and run there by `python -`.

It uses the standard library only, because hvfreeze may be missing there. The first argument is a JSON object with `do`
and its arguments; every answer is one line of JSON.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "h5py", "numpy")
CHUNK_BYTES = 1 << 20
PINGS = 20


def facts(order: dict[str, Any]) -> dict[str, Any]:
    """Return versions, code, directories, used ports, cores and the time of this node.

    `order` has `cache_dir`, `data_dir` (paths, or "" for none) and `ports` ([first, last], or []).
    """
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "code": _code(),
        "mpi": _mpi(),
        "cache": _writable(order["cache_dir"]) if order["cache_dir"] else "",
        "data": _listing(order["data_dir"]) if order["data_dir"] else "",
        "used_ports": [port for port in _range(order["ports"]) if not _is_free(port)],
        "cores": len(os.sched_getaffinity(0)),
        "time": time.time(),
    }


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return "missing"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _code() -> str:
    """Return the SHA-256 over names and bytes of the package's Python files, "missing" without the package."""
    found = importlib.util.find_spec("hvfreeze")
    if found is None or not found.submodule_search_locations:
        return "missing"
    root = Path(next(iter(found.submodule_search_locations)))
    digest = hashlib.sha256()
    # The cache package is a link inside the tree.
    files = [Path(where, name) for where, _, names in os.walk(root, followlinks=True) for name in names]
    for path in sorted(path for path in files if path.suffix == ".py"):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _mpi() -> str:
    try:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    found = re.search(r"(Open MPI|MPICH|HYDRA).*?(\d+\.\d[\w.]*)", text, re.DOTALL)
    return f"{found.group(1)} {found.group(2)}" if found else "unknown"


def _writable(directory: str) -> str:
    """Return "" if 1 MiB can be written to the directory, which is created if necessary; else the reason."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(bytes(CHUNK_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error.strerror)
    return ""


def _listing(directory: str) -> str:
    """Return a hash of the names in the directory and in its own directories; else the error."""
    try:
        names = sorted(os.listdir(directory))
        below = [sorted(os.listdir(Path(directory, name))) for name in names if Path(directory, name).is_dir()]
    except OSError as error:
        return f"error: {error.strerror}"
    return hashlib.sha256(json.dumps([names, below]).encode()).hexdigest()


def _range(ports: list[int]) -> range:
    return range(ports[0], ports[1] + 1) if ports else range(0)


def _is_free(port: int) -> bool:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", port))
        except OSError:
            return False
    return True


def listen(order: dict[str, Any]) -> dict[str, Any]:
    """Print a port, echo some single bytes there, and then receive the data of `send`.

    Return {"bytes", "seconds"}, from the first byte of the data to the last. `order` has `token`, which a sender must
    send first, and `ports` as in `facts`.
    """
    with socket.socket() as server:
        free = [port for port in _range(order["ports"]) if _is_free(port)]
        # As `_is_free` asks: a port that a job has just left is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", free[0] if free else 0))
        server.listen(1)
        server.settimeout(20)
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(20)
        token = order["token"].encode()
        if connection.recv(len(token), socket.MSG_WAITALL) != token:
            return {"bytes": 0, "seconds": 1.0}
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        received, start = 0, time.monotonic()
        while chunk := connection.recv(CHUNK_BYTES):
            received += len(chunk)
        return {"bytes": received, "seconds": time.monotonic() - start}


def send(order: dict[str, Any]) -> dict[str, Any]:
    """Send data to `listen` on `host`:`port` for `seconds`; return {"error"}, a reason or "", and {"latency"}.

    The latency, in seconds, is half of the fastest round trip of a byte.
    """
    try:
        with socket.create_connection((order["host"], order["port"]), timeout=5) as connection:
            connection.settimeout(20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(order["token"].encode())
            trips = []
            for _ in range(PINGS):
                start = time.monotonic()
                connection.sendall(b"?")
                connection.recv(1)
                trips.append(time.monotonic() - start)
            end = time.monotonic() + order["seconds"]
            while time.monotonic() < end:
                connection.sendall(bytes(CHUNK_BYTES))
    except OSError as error:
        return {"error": str(error), "latency": 0.0}
    return {"error": "", "latency": min(trips) / 2}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps({"facts": facts, "listen": listen, "send": send}[task["do"]](task)), flush=True)
