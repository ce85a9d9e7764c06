from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvfreeze.doctor.hosts import read_hostfile
from hvfreeze.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(LAUNCH))
    return importlib.import_module("restarts")


@pytest.fixture
def cluster_cli(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(LAUNCH))
    return importlib.import_module("cluster_cli")


def bash(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a script said that has the settings and the functions for hosts."""
    sources = f". {LAUNCH}/settings.sh; . {LAUNCH}/hosts.sh; {script}"
    known = {"PATH": os.environ["PATH"], "HOME": "/nowhere", **variables}
    return subprocess.run(["bash", "-c", sources, "test"], env=known, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_valid_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""


def test_only_named_variables_reach_a_launcher() -> None:
    variables = {"FAKE_API_KEY": "sesame", "SLURM_JWT": "sesame", "SLURM_JOB_ID": "1", "OMPI_MCA_btl": "tcp", "A": "b"}
    said = bash("hvfreeze_exec env", **variables, HVFREEZE_KEEP="A").stdout.splitlines()
    assert {"HOME=/nowhere", "SLURM_JOB_ID=1", "OMPI_MCA_btl=tcp", "A=b"} <= set(said)
    assert "sesame" not in "".join(said)


def test_only_what_ranks_need_is_named_to_other_nodes() -> None:
    variables = {"FAKE_API_KEY": "sesame", "SLURM_JOB_ID": "1", "SSH_AUTH_SOCK": "/x", "PYTHONPATH": "/y"}
    names = bash("hvfreeze_settings 1; hvfreeze_variables", **variables).stdout.split()
    assert {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "HOROVOD_FUSION_THRESHOLD"} <= set(names)
    assert not {"FAKE_API_KEY", "SLURM_JOB_ID", "SSH_AUTH_SOCK", "HOME"} & set(names)


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "yields"), [(1, 8, "8", ""), (4, 8, "2", ""), (4, 7, "1", "1"), (1, 1, "1", "1")]
)
def test_threads_and_yielding_follow_from_ranks_and_cores(ranks: int, cores: int, threads: str, yields: str) -> None:
    script = f"hvfreeze_settings {ranks}; echo $OMP_NUM_THREADS $OMPI_MCA_mpi_yield_when_idle"
    assert bash(script, HVFREEZE_CORES=str(cores)).stdout.split() == [threads, *yields.split()]


def test_threads_that_a_user_asks_of_openmp_are_not_taken_for_cores(tmp_path: Path) -> None:
    """As coreutils' nproc does, which ranks that wait would then give way on idle cores for."""
    fake = tmp_path / "nproc"
    fake.write_text("#!/bin/sh\necho ${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-8}}\n")
    fake.chmod(0o755)
    variables = {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert bash("hvfreeze_settings 4; echo $OMPI_MCA_mpi_yield_when_idle", **variables).stdout == "\n"


def test_the_launcher_of_open_mpi_5_is_told_to_bind_nothing_too() -> None:
    said = bash("hvfreeze_settings 1; hvfreeze_exec env").stdout.splitlines()
    assert {"PRTE_MCA_hwloc_default_binding_policy=none", "PRTE_MCA_rmaps_default_mapping_policy=slot"} <= set(said)


def test_a_variable_that_is_set_wins_over_the_settings() -> None:
    script = "hvfreeze_settings 1; echo $OMP_NUM_THREADS $MPIEXEC_TIMEOUT $HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    variables = {"OMP_NUM_THREADS": "3", "HVFREEZE_DEADLINE": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120"}
    assert bash(script, **variables).stdout.split() == ["3", "60", "120"]


@pytest.mark.skipif(
    shutil.which("ompi_info") is None, reason="ompi_info, which knows Open MPI's settings, is not there"
)
def test_open_mpi_knows_every_setting_of_its_own() -> None:
    known = subprocess.check_output(["ompi_info", "--all", "--parsable"], text=True)
    names = set(re.findall(r"OMPI_MCA_(\w+)=", (LAUNCH / "settings.sh").read_text()))
    assert len(names) > 10
    assert [name for name in sorted(names) if f":param:{name}:value:" not in known] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-np 4 python train.py", "4 localhost:4 4 | python train.py"),
        ("-np 3 -H a:2,b:2 x --y -np 9", "3 a:2,b:2 2 | x --y -np 9"),
        ("-H a,b x", "2 a,b 1 | x"),
        ("--hostfile FILE x", "5 a:2,b:1,c:2 2 | x"),
    ],
)
def test_hosts_and_ranks_are_read_from_the_command_line(tmp_path: Path, arguments: str, expected: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2 # the first\n\nb\n  c:2\n")
    arguments = arguments.replace("FILE", str(tmp_path / "hosts"))
    said = bash(f'hvfreeze_arguments x {arguments}; echo "$np $hosts $ranks_per_node | ${{command[*]}}"')
    assert said.stdout.strip() == expected, said.stderr


def test_in_a_slurm_job_the_ranks_are_those_of_the_job() -> None:
    script = 'hvfreeze_arguments x y; echo "$np:$hosts:$ranks_per_node"'
    assert bash(script, SLURM_NNODES="2", SLURM_NTASKS="5").stdout.strip() == "5::3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-np 4", "usage:"),
        ("-np four x", "usage:"),
        ("-np 4 -H a:1,b:1 x", "-np 4, but the hosts have 2 slots: a:1,b:1"),
        ("-H a:one x", "HOST:SLOTS,... is wanted"),
        ("-H a:1,-V:1 x", "HOST:SLOTS,... is wanted"),
        ("--bind-to none x", "--bind-to is not known here"),
        ("--hostfile /no/such/file x", "hostfile /no/such/file cannot be read"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(arguments: str, words: str) -> None:
    done = bash(f"hvfreeze_arguments script {arguments}")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_host_without_the_package_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho has no Python package hvfreeze for me\n")
    (tmp_path / "python").chmod(0o755)
    job = [LAUNCH / "mpirun.sh", "-np", "1", "python", "-m", "hvfreeze", "train"]
    done = subprocess.run(
        job, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"{LAUNCH}/mpirun.sh: localhost: has no Python package hvfreeze for me\n"


def test_a_directory_that_cannot_be_written_is_said_before_anything_starts() -> None:
    job = [LAUNCH / "mpirun.sh", "-np", "1", sys.executable, "-m", "hvfreeze", "train", "--cache-dir", "/proc/cache"]
    done = subprocess.run(job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "localhost: cannot write 1 MiB to /proc" in done.stderr


@pytest.mark.parametrize(
    ("command", "filled"),
    [
        ("horovodrun -np 2 x", "horovodrun --disable-cache -H a:1,b:1 -np 2 x"),
        ("launch/restart -- launch/horovodrun.sh x", "launch/restart -- launch/horovodrun.sh -H a:1,b:1 x"),
        ("mpirun --hostfile f x", "mpirun --hostfile f x"),
        ("horovodrun --hosts=c:1 x", "horovodrun --disable-cache --hosts=c:1 x"),
        ("ssh b true", "ssh b true"),
    ],
)
def test_a_cluster_fills_in_its_hosts_where_none_are_named(cluster_cli: ModuleType, command: str, filled: str) -> None:
    assert cluster_cli.with_hosts(command.split(), "a:1,b:1") == filled.split()


@pytest.mark.parametrize(
    ("hosts", "ranks", "spread"),
    [
        ({"a": 1, "b": 1}, 2, {"a": 1, "b": 1}),
        ({"a": 1, "b": 1}, 3, {"a": 2, "b": 2}),
        ({"a": 4, "b": 1}, 5, {"a": 4, "b": 1}),
        ({"a": 1}, 4, {"a": 4}),
    ],
)
def test_ranks_of_dead_hosts_are_spread_over_the_others(
    restarts: ModuleType, hosts: dict[str, int], ranks: int, spread: dict[str, int]
) -> None:
    assert restarts.spread(hosts, ranks) == spread


GOOD_HOSTS = ["a", "node-1.example.org:16", "10.0.0.7:1", "A_b", "9:999999"]
BAD_HOSTS = [
    "-oProxyCommand=touch${IFS}ran:1",
    "-a",
    "--",
    ".a",
    "_a",
    "a:0",
    "a:-1",
    "a:b:2",
    "a:",
    ":2",
    "a;b",
    "$(a)",
]
BAD_HOSTS += ["a b", "a:1000000", "\u00e4", "a@b", "a/b", "[::1]"]


@pytest.mark.parametrize("host", [*GOOD_HOSTS, *BAD_HOSTS])
def test_a_hosts_name_is_judged_alike_by_every_launcher_and_by_the_doctor(tmp_path: Path, host: str) -> None:
    (tmp_path / "hosts").write_text(f"b:1\n{host}\n")
    flags = f"-np 1 --hostfile {tmp_path}/hosts"
    shell = subprocess.run(
        ["bash", "-c", f'. {LAUNCH}/hosts.sh; hvfreeze_arguments x {flags} run; echo "$hosts"'],
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    started = ["bash", "-c", f"touch {tmp_path}/ran", "x", *flags.split(), "--run-dir", str(tmp_path / "x")]
    # In a process of its own: it ends all that is below the process it runs in.
    restarted = subprocess.run([LAUNCH / "restart", "--max-restarts=0", "--", *started], capture_output=True).returncode
    try:
        doctored = len(read_hostfile(tmp_path / "hosts"))
    except UsageError:
        doctored = 0
    assert (tmp_path / "ran").exists() == (host in GOOD_HOSTS)
    expected = (0, 0, 2) if host in GOOD_HOSTS else (2, 2, 0)
    assert (shell.returncode, restarted, doctored) == expected, shell.stdout + shell.stderr


def test_the_hosts_of_a_command_are_found_and_replaced(restarts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb # last\n")
    for words in (f"run --hostfile {tmp_path}/hosts x", "run -H a:2,b x", "run --hosts=a:2,b x"):
        assert restarts.hosts_of(words.split()) == {"a": 2, "b": 1}
        assert restarts.with_hosts(words.split(), {"b": 3}) == ["run", "-H", "b:3", "x"]
    assert restarts.hosts_of(["run", "x"]) == {}


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff\n", "it is no text")])
def test_a_hostfile_that_cannot_be_read_is_refused_by_its_name(
    restarts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        restarts.hosts_of(["run", "--hostfile", str(tmp_path / "hosts"), "x"])
    assert ended.value.code == 2 and f"({tmp_path}/hosts) cannot be read: {why}" in capsys.readouterr().err
