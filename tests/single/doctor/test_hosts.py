from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvfreeze.chain.models import build_model
from hvfreeze.doctor import asking, host_checks, hosts, network_checks, remote
from hvfreeze.doctor.host_checks import Answer, Host
from hvfreeze.doctor.network_checks import Link
from hvfreeze.errors import UsageError
from hvfreeze.ranks.exchange.layout import messages_of
from hvfreeze.ranks.reducer import BUCKET_BYTES

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


@pytest.mark.parametrize("text", ["", "# nobody\n", "a slots=two\n", "a\na\n"])
def test_a_file_that_is_no_hostfile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=str(tmp_path / "hosts")):
        hosts.read_hostfile(tmp_path / "hosts")


def test_a_hostfile_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        hosts.read_hostfile(tmp_path / "hosts")


def test_hosts_that_are_alike_pass_every_check() -> None:
    answers = {name: Answer(said, "", "", 999.5, 1000.5) for name, said in facts().items()}
    three = [Host(name, 1) for name in answers]
    checks = [
        host_checks.check_ssh(answers),
        host_checks.check_versions(facts()),
        host_checks.check_same("code", {name: said["code"] for name, said in facts().items()}, remedy="x"),
        host_checks.check_cache_directory(facts(), directory="/c"),
        host_checks.check_data_directory(facts(), directory="/d"),
        host_checks.check_ports(facts(), three, ports=[1000, 1009]),
        host_checks.check_clock(answers),
        host_checks.check_slots(facts(), three),
        network_checks.check_bandwidth(links(900.0, 950.0)),
        network_checks.check_latency(links(900.0, 950.0)),
        network_checks.check_job(links(9000.0, 9500.0)),
    ]
    assert [check.verdict for check in checks] == ["OK"] * len(checks)


def test_another_version_and_a_missing_package_are_named_with_their_host() -> None:
    check = host_checks.check_versions(facts(versions={**ALIKE["versions"], "torch": "2.0", "horovod": "missing"}))
    assert not check.ok
    assert "torch 1.0, but b 2.0" in check.value
    assert "no horovod on b" in check.value


@pytest.mark.parametrize(("code", "words"), [("other", "different on b"), ("missing", "missing on b")])
def test_other_code_on_a_host_is_a_problem(code: str, words: str) -> None:
    check = host_checks.check_same("code", {"a": "abc", "b": code, "c": "abc"}, remedy="install it")
    assert (check.ok, check.value) == (False, words)


def test_a_cache_directory_that_cannot_be_written_is_a_problem() -> None:
    check = host_checks.check_cache_directory(facts(cache="No space left on device"), directory="/c")
    assert (check.ok, check.value) == (False, "/c: b: No space left on device")


@pytest.mark.parametrize(("data", "words"), [("error: No such file", "b: No such file"), ("other", "different on b")])
def test_other_data_on_a_host_is_a_problem(data: str, words: str) -> None:
    check = host_checks.check_data_directory(facts(data=data), directory="/d")
    assert not check.ok
    assert words in check.value


def test_used_ports_are_a_problem_only_when_too_few_are_left() -> None:
    three = [Host(name, 1) for name in "abc"]
    said = facts(used_ports=[1000, 1001])
    assert host_checks.check_ports(said, three, ports=[1000, 1004]).verdict == "note"
    check = host_checks.check_ports(said, three, ports=[1000, 1003])
    assert not check.ok
    assert "b: 1000, 1001 in use" in check.value and "too few are free on b" in check.value


@pytest.mark.parametrize(("time", "words"), [(900.0, "b is 100 s behind"), (1101.0, "b is 100 s ahead")])
def test_a_wrong_clock_is_noted_with_its_direction(time: float, words: str) -> None:
    answers = {name: Answer(said, "", "", 1000.0, 1001.0) for name, said in facts(time=time).items()}
    check = host_checks.check_clock(answers)
    assert (check.verdict, check.value) == ("note", words)


def test_a_clock_within_the_time_that_the_answer_took_is_not_called_wrong() -> None:
    answers = {"a": Answer({**ALIKE, "time": 1030.0}, "", "", 1000.0, 1060.0)}
    assert host_checks.check_clock(answers).verdict == "OK"


def test_more_ranks_than_cores_are_noted() -> None:
    check = host_checks.check_slots(facts(), [Host("a", 2), Host("b", 3), Host("c", 1)])
    assert (check.verdict, check.value) == ("note", "b: 3 ranks, 2 cores")


def test_a_slow_link_is_noted_and_a_broken_one_is_a_problem() -> None:
    slow = network_checks.check_bandwidth(links(900.0, 100.0))
    assert slow.verdict == "note" and "b -> a" in slow.remedy
    half = {**links(900.0, 100.0), ("a", "b"): "timed out"}
    broken = network_checks.check_bandwidth(half)
    assert (broken.ok, broken.value) == (False, "a -> b: timed out")
    assert network_checks.check_job(half).value == "not known"


def test_what_a_job_makes_of_the_network_follows_the_formula() -> None:
    check = network_checks.check_job(links(100.0, 200.0))
    # 44.7 MB at 100 Mbit/s take 3.58 s, of which 0.15 hide; 12 sums cost two latencies each.
    assert "3.68 s" in f"{float(check.value.split(' ms with none')[0].split()[-1]) / 1e3:.2f} s"
    assert check.verdict == "note" and "--compression auto" in check.remedy
    assert network_checks.check_job({}).value == "one host: nothing to exchange"


@pytest.mark.parametrize("compression", sorted(network_checks.RESNET18))
def test_the_bytes_of_resnet18_are_what_a_job_exchanges(compression: str) -> None:
    named = list(build_model("resnet18", num_classes=10, image_size=32).model.named_parameters())
    messages = messages_of(named, compression=compression, size=2, bucket_bytes=BUCKET_BYTES)
    total = sum(message.first_bytes + message.second_bytes for message in messages)
    sums = sum(1 + bool(message.second_bytes) for message in messages)
    assert network_checks.RESNET18[compression] == (total, sums)


def test_hosts_that_do_not_answer_are_told_apart() -> None:
    answers = {
        "a": Answer(ALIKE, "", "", 0.0, 1.0),
        "b": Answer({}, "ssh refuses the key", "copy it", 0.0, 1.0),
        "c": Answer({}, "no answer", "start it", 0.0, 1.0),
    }
    check = host_checks.check_ssh(answers)
    assert (check.ok, check.value) == (False, "b: ssh refuses the key; c: no answer")
    assert check.remedy == "copy it; start it"


@pytest.mark.parametrize("text", ["1000", "0-5", "10-5", "1-70000", "a-b"])
def test_a_wrong_range_of_ports_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HVFREEZE_PORTS", text)
    with pytest.raises(UsageError, match="HVFREEZE_PORTS"):
        hosts.host_checks([Host("localhost", 1)])


def test_this_machine_passes_as_the_only_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hosts.run_hosts_doctor([Host("localhost", 1)], data_dir=tmp_path, cache_dir=tmp_path) == 0
    assert "1 host alike" in capsys.readouterr().out


def test_a_directory_that_cannot_be_made_is_found_by_the_probe() -> None:
    order = {"do": "facts", "cache_dir": "/proc/cache", "data_dir": "/no/such", "ports": []}
    probe = [sys.executable, "-", json.dumps(order)]
    said = json.loads(subprocess.check_output(probe, input=Path(remote.__file__).read_text(), text=True))
    assert said["cache"] == "No such file or directory"
    assert said["data"] == "error: No such file or directory"
    assert said["versions"]["torch"] not in ("missing", "unknown")
    assert len(said["code"]) == 64


def test_the_probe_needs_nothing_that_a_bare_python_lacks() -> None:
    order = json.dumps({"do": "facts", "cache_dir": "", "data_dir": "", "ports": []})
    probe = [sys.executable, "-I", "-S", "-", order]
    said = json.loads(subprocess.check_output(probe, input=Path(remote.__file__).read_text(), text=True, cwd="/"))
    assert (said["versions"]["torch"], said["code"]) == ("missing", "missing")


def test_the_ring_measures_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "BANDWIDTH_SECONDS", 0.1)
    pair = [Host("localhost", 1), Host("127.0.0.1", 1)]
    found = asking.measure_ring(pair, ports=[])
    assert set(found) == {("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")}
    for link in found.values():
        assert isinstance(link, network_checks.Link), link
        assert link.megabits_per_second > 0 and 0 < link.latency_seconds < 0.5
