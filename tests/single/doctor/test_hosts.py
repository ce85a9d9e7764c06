from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvfreeze.comm.reducer import BUCKET_BYTES
from hvfreeze.doctor import host_checks as checks
from hvfreeze.doctor import hosts, remote
from hvfreeze.doctor.host_checks import Answer, Host, Link
from hvfreeze.doctor.this_machine import CheckResult
from hvfreeze.errors import UsageError
from hvfreeze.model.model_sources import build_model
from tests.messages import messages_of

ALIKE: dict[str, Any] = {
    "python": "3.11.7",
    "versions": dict.fromkeys(remote.PACKAGES, "1.0"),
    "code": "abc",
    "mpi": "Open MPI 4.1.4",
    "cache": "",
    "data": "def",
    "used_ports": [],
    "cores": 2,
    "time": 1000.0,
}


def links(there: float, back: float) -> dict[tuple[str, str], Link | str]:
    """Two hosts' links in Mbit/s, a tenth of a millisecond long."""
    return {("a", "b"): Link(there, 1e-4), ("b", "a"): Link(back, 1e-4)}


def facts(**changes: Any) -> dict[str, dict[str, Any]]:
    """Three hosts, of which b differs."""
    return {"a": ALIKE, "b": {**ALIKE, **changes}, "c": ALIKE}


def test_hosts_are_read_from_a_list_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# nodes\na slots=2\n\nb:1\nc # no number\n")
    expected = (Host("a", 2), Host("b", 1), Host("c", 1))
    assert hosts.parse_hosts("a:2, b,c:1") == expected
    assert hosts.read_hostfile(tmp_path / "hosts") == expected


@pytest.mark.parametrize("text", ["", "a,,b", "a:0", "a:x", "a b", "-oProxyCommand=x", "a,b,a:2"])
def test_a_list_that_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        hosts.parse_hosts(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "names no host"),
        (b"# nobody\n", "names no host"),
        (b"a slots=two\n", "must be NAME or NAME:SLOTS"),
        (b"a\na\n", "names a more than once"),
        ("node0 slots=1\n".encode("utf-16"), "is not UTF-8 text; give a file with one host per line"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_hostfile_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"--hostfile {file}.*{message}"):
        hosts.read_hostfile(file)


def clock(time: float, *, answered: float = 1001.0) -> CheckResult:
    """The check of one host, asked at 1000 s, whose clock says `time`."""
    return checks.check_clock({"b": Answer({**ALIKE, "time": time}, "", "", 1000.0, answered)})


def code(of_b: str) -> CheckResult:
    return checks.check_same("code", {"a": "abc", "b": of_b, "c": "abc"}, remedy="install it")


def ports(last: int, **changes: Any) -> CheckResult:
    return checks.check_ports(facts(**changes), [Host(name, 1) for name in "abc"], ports=[1000, last])


def versions(**changes: str) -> CheckResult:
    return checks.check_versions(facts(versions={**ALIKE["versions"], **changes}))


HALF: dict[tuple[str, str], Link | str] = {**links(900.0, 100.0), ("a", "b"): "timed out"}
ANSWERS = {"a": Answer(ALIKE, "", "", 0.0, 1.0)}
SILENT = {
    "b": Answer({}, "ssh rejects the key", "copy it", 0.0, 1.0),
    "c": Answer({}, "no answer", "start it", 0.0, 1.0),
}


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (checks.check_ssh(ANSWERS), "OK: 1 host answer"),
        (checks.check_ssh({**ANSWERS, **SILENT}), "PROBLEM: b: ssh rejects the key; c: no answer -> copy it; start it"),
        (versions(), "OK: 3 hosts alike"),
        (
            versions(torch="2.0", horovod="missing"),
            "PROBLEM: torch 1.0, but b 2.0; no horovod on b -> run `make setup`",
        ),
        (code("abc"), "OK: 3 hosts alike"),
        (code("other"), "PROBLEM: different on b -> install it on all nodes"),
        (code("missing"), "PROBLEM: missing on b -> install it there, or share it"),
        (checks.check_cache_directory(facts(), directory="/c"), "OK: /c is writable"),
        (
            checks.check_cache_directory(facts(cache="No space left"), directory="/c"),
            "PROBLEM: /c: b: No space left -> ",
        ),
        (checks.check_data_directory(facts(), directory="/d"), "OK: 3 hosts alike"),
        (checks.check_data_directory(facts(data="error: No such"), directory="/d"), "PROBLEM: /d: b: No such -> copy"),
        (
            checks.check_data_directory(facts(data="other"), directory="/d"),
            "PROBLEM: different on b -> put the same /d",
        ),
        (ports(1009), "OK: 1000-1009: free"),
        (ports(1004, used_ports=[1000, 1001]), "note: 1000-1004: b: 1000, 1001 in use -> the other"),
        (ports(1003, used_ports=[1000, 1001]), "PROBLEM: 1000-1003: b: 1000, 1001 in use; too few free ports on b -> "),
        (clock(1000.0), "OK: 1 host within 2 s"),
        (clock(900.0), "note: b is 100 s behind -> "),
        (clock(1101.0), "note: b is 100 s ahead -> "),
        (clock(1030.0, answered=1060.0), "OK: 1 host within 2 s"),
        (checks.check_slots(facts(), [Host("a", 2), Host("b", 3)]), "note: b: 3 ranks, 2 cores -> "),
        (checks.check_slots(facts(), [Host("a", 2), Host("b", 2)]), "OK: 6 for 4 ranks"),
        (checks.check_bandwidth(links(900.0, 950.0)), "OK: 900 to 950 Mbit/s, all hosts sending"),
        (
            checks.check_bandwidth(links(900.0, 100.0)),
            "note: 100 to 900 Mbit/s, all hosts sending to the next at once -> b -> a",
        ),
        (checks.check_bandwidth(HALF), "PROBLEM: a -> b: timed out -> open the firewall"),
        (checks.check_latency(links(900.0, 950.0)), "OK: 0.10 to 0.10 ms"),
        (checks.check_job(links(9000.0, 9500.0)), "OK: predicted for ResNet-18 (250 ms of computation)"),
        (checks.check_job(HALF), "OK: not known"),
        (checks.check_job({}), "OK: one host: no communication"),
    ],
    ids=str,
)
def test_hosts_and_links_that_differ_are_named_with_a_remedy_and_others_pass(check: CheckResult, expected: str) -> None:
    assert f"{check.verdict}: {check.value} -> {check.remedy}".startswith(expected)


def test_what_a_job_makes_of_the_network_follows_the_formula() -> None:
    check = checks.check_job(links(100.0, 200.0))
    # 44.7 MB at 100 Mbit/s take 3.58 s, of which 0.15 hide; 12 sums cost two latencies each.
    assert "3.68 s" in f"{float(check.value.split(' ms with none')[0].split()[-1]) / 1e3:.2f} s"
    assert check.verdict == "note" and "--compression auto" in check.remedy


@pytest.mark.parametrize("compression", sorted(checks.RESNET18))
def test_the_bytes_of_resnet18_are_what_a_job_exchanges(compression: str) -> None:
    named = list(build_model("resnet18", num_classes=10, image_size=32).model.named_parameters())
    messages = messages_of(named, compression=compression, size=2, bucket_bytes=BUCKET_BYTES)
    sums = sum(1 + bool(second) for _, second in messages)
    assert checks.RESNET18[compression] == (sum(map(sum, messages)), sums)


@pytest.mark.parametrize("text", ["1000", "0-5", "10-5", "1-70000", "a-b"])
def test_a_wrong_range_of_ports_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HVFREEZE_PORTS", text)
    with pytest.raises(UsageError, match="HVFREEZE_PORTS"):
        hosts.host_checks([Host("localhost", 1)])


def test_this_machine_passes_as_the_only_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hosts.run_hosts_doctor([Host("localhost", 1)], data_dir=tmp_path, cache_dir=tmp_path) == 0
    out = capsys.readouterr().out
    assert "1 host alike" in out and "This host is usable" in out


@pytest.mark.parametrize(
    ("local", "sender", "address"),
    [
        ("localhost", "node1", "here"),
        ("127.0.0.1", "node1", "here"),
        ("here", "node1", "here"),
        ("localhost", "127.0.0.1", "localhost"),
    ],
)
def test_another_host_is_told_this_machines_own_name(
    monkeypatch: pytest.MonkeyPatch, local: str, sender: str, address: str
) -> None:
    told: dict[str, str] = {}

    def start(host: Host, order: dict[str, Any]) -> Any:
        if order["do"] == "send":
            told[host.name] = order["host"]
        return SimpleNamespace(stdout=["{}"], communicate=lambda timeout: ("", ""), kill=lambda: None)

    monkeypatch.setattr(hosts, "_start", start)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    hosts.measure_ring([Host(local, 1), Host(sender, 1)], ports=[])
    assert told == {local: sender, sender: address}


def test_a_host_is_sent_what_launchers_send_and_nothing_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/a lib")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    begun: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: begun.append(words))
    hosts._start(Host("node1", 1), {})
    ssh, remote_words = begun[0][0], shlex.split(begun[0][-1])
    assert ssh == "ssh" and "LD_LIBRARY_PATH=/opt/a lib" in remote_words
    assert not any(word.startswith("PYTHONPATH=") for word in remote_words)


MISSING_LIBRARY = (
    "/opt/python: error while loading shared libraries: libpython3.11.so.1.0: "
    "cannot open shared object file: No such file or directory"
)


@pytest.mark.parametrize(
    ("said", "error", "remedy"),
    [
        (MISSING_LIBRARY, MISSING_LIBRARY, "LD_LIBRARY_PATH"),
        ("env: '/opt/python': No such file or directory", f"no Python at {sys.executable}", "make setup"),
    ],
)
def test_a_python_without_its_library_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, said: str, error: str, remedy: str
) -> None:
    process = SimpleNamespace(communicate=lambda timeout: ("", f"{said}\n"), returncode=127)
    monkeypatch.setattr(hosts, "_start", lambda host, order: process)
    answer = hosts.ask(Host("node1", 1), {})
    assert answer.error == error and remedy in answer.remedy


def facts_of_this_machine(*flags: str, **order: object) -> dict[str, Any]:
    """The answer of the probe, run by `python FLAGS -` as on another host."""
    words = json.dumps({"do": "facts", "cache_dir": "", "data_dir": "", "ports": [], **order})
    text = Path(remote.__file__).read_text()
    said: dict[str, Any] = json.loads(
        subprocess.check_output([sys.executable, *flags, "-", words], input=text, text=True)
    )
    return said


def test_a_directory_that_cannot_be_made_is_found_by_the_probe() -> None:
    said = facts_of_this_machine(cache_dir="/proc/cache", data_dir="/no/such")
    assert said["cache"] == "No such file or directory"
    assert said["data"] == "error: No such file or directory"
    assert said["versions"]["torch"] not in ("missing", "unknown")
    assert len(said["code"]) == 64


def test_the_probe_needs_nothing_that_a_bare_python_lacks() -> None:
    said = facts_of_this_machine("-I", "-S")
    assert (said["versions"]["torch"], said["code"]) == ("missing", "missing")


def test_the_ring_measures_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "BANDWIDTH_SECONDS", 0.1)
    pair = [Host("localhost", 1), Host("127.0.0.1", 1)]
    found = hosts.measure_ring(pair, ports=[])
    assert set(found) == {("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")}
    for link in found.values():
        assert isinstance(link, checks.Link), link
        assert link.megabits_per_second > 0 and 0 < link.latency_seconds < 0.5
