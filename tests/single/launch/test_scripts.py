from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvfreeze.allocator import SETTINGS
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


def test_every_script_is_valid_bash() -> None:
    for script in SCRIPTS:
        assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b"", script


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


# Names that the guides mention, and that hold neither a token nor a password.
OF_GUIDES = {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME", "XDG_CACHE_HOME", "WANDB_MODE", "WANDB_PROJECT"}
OF_GUIDES |= {"MLFLOW_EXPERIMENT_NAME", "HVFREEZE_DATA", "HVFREEZE_MAX_MEGAPIXELS", "HOROVOD_CYCLE_TIME"}
OF_GUIDES |= {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"}


def test_variables_that_the_guides_name_reach_ranks_and_slurm_jobs() -> None:
    variables = dict.fromkeys([*OF_GUIDES, "MLFLOW_TRACKING_URI", "WANDB_API_KEY", "HF_TOKEN"], "x")
    names = bash("hvfreeze_variables", **variables).stdout.split()
    assert set(names) & set(variables) == OF_GUIDES
    export = re.search(r"^#SBATCH --export=(.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert export is not None and set(export[1].split(",")) >= OF_GUIDES


def test_freed_memory_is_kept_unless_a_user_sets_the_allocator() -> None:
    script = "hvfreeze_settings 1; hvfreeze_variables | grep MALLOC_"
    assert bash(script).stdout.split() == list(SETTINGS)
    assert bash(f"{script}; env | grep MALLOC_").stdout.split()[2:] == [f"{k}={v}" for k, v in SETTINGS.items()]
    assert bash(script, MALLOC_TRIM_THRESHOLD_="131072").stdout.split() == ["MALLOC_TRIM_THRESHOLD_"]


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
        ("-H a,b x", "2 a:1,b:1 1 | x"),
        ("-H a:1,b:1,a:2 x", "4 a:3,b:1 3 | x"),
        ("--hostfile FILE x", "5 a:2,b:1,c:2 2 | x"),
    ],
)
def test_hosts_and_ranks_are_read_from_the_command_line(tmp_path: Path, arguments: str, expected: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2 # the first\n\nb\n  c:2\n")
    arguments = arguments.replace("FILE", str(tmp_path / "hosts"))
    said = bash(f'hvfreeze_arguments x {arguments}; echo "$np $hosts $ranks_per_node | ${{command[*]}}"')
    assert said.stdout.strip() == expected, said.stderr


def test_in_a_pbs_job_the_hosts_are_those_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\nb\na\n")
    for given, expected in (("", "3 a:2,b:1 2"), ("-H c:1", "1 c:1 1")):
        script = f'hvfreeze_arguments x {given} y; echo "$np $hosts $ranks_per_node"'
        assert bash(script, PBS_NODEFILE=str(tmp_path / "nodes")).stdout.strip() == expected


def test_in_a_slurm_job_the_ranks_are_those_of_the_job() -> None:
    script = 'hvfreeze_arguments x y; echo "$np:$hosts:$ranks_per_node"'
    assert bash(script, SLURM_NNODES="2", SLURM_NTASKS="5").stdout.strip() == "5::3"


WRONG = {
    "-np 4": "usage:",
    "-np four x": "usage:",
    "-np 4 -H a:1,b:1 x": "-np 4, but the hosts have 2 slots: a:1,b:1",
    "-H a:one x": "must be HOST:SLOTS,...",
    "-H a:1,-V:1 x": "must be HOST:SLOTS,...",
    "--bind-to none x": "--bind-to is an unknown option",
    "-H a:1, x": "must be HOST:SLOTS,...",
    "-H '' x": "-H names no host",
    "--hostfile '' x": "--hostfile  names no host",
    "--hostfile /dev/null x": "--hostfile /dev/null names no host",
    "--hostfile <(echo '# none') x": "names no host",
    "--hostfile /no/such/file x": "hostfile /no/such/file cannot be read",
}


@pytest.mark.parametrize("job", [{}, {"SLURM_NNODES": "2", "SLURM_NTASKS": "2"}], ids=["alone", "in a Slurm job"])
def test_a_wrong_command_line_is_refused_in_one_line(job: dict[str, str]) -> None:
    done = bash("; ".join(f"(hvfreeze_arguments script {wrong}); echo $?" for wrong in WRONG), **job)
    assert done.stdout.split() == ["2"] * len(WRONG)
    for said, (wrong, words) in zip(done.stderr.splitlines(), WRONG.items(), strict=True):
        assert words in said, wrong


def test_a_host_without_the_package_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho has no Python package hvfreeze for me\n")
    (tmp_path / "python").chmod(0o755)
    job = [LAUNCH / "mpirun.sh", "-np", "1", "python", "-m", "hvfreeze", "train"]
    done = subprocess.run(
        job, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"{LAUNCH}/mpirun.sh: localhost: has no Python package hvfreeze for me\n"


def stub(folder: Path, name: str, script: str) -> None:
    """Put a program of this name, a shell script, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def run(script: str, *words: str, stubs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a script of launch/ said with these programs in place of the real ones."""
    known = {"PATH": f"{stubs}:{os.environ['PATH']}", "HOME": "/nowhere", **variables}
    return subprocess.run(["bash", LAUNCH / script, *words], env=known, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("program", "hosts", "threads"),
    [
        ("mpirun", "small:1,large:1", "2"),
        ("mpirun", "large:1", "6"),
        ("horovodrun", "large:1,small:1", "2"),
        ("horovodrun", "large:3", "2"),
    ],
)
def test_threads_are_those_of_the_smallest_host_and_not_of_the_machine_that_launches(
    tmp_path: Path, program: str, hosts: str, threads: str
) -> None:
    stub(tmp_path, "nproc", "case ${NODE:-} in small) echo 2 ;; large) echo 6 ;; *) echo 64 ;; esac")
    # The name of the host is the last word before the command; ssh's options and their values come before it.
    stub(tmp_path, "ssh", "while [[ $2 != bash ]]; do shift; done; export NODE=$1; exec bash -s")
    stub(tmp_path, program, 'echo "$OMP_NUM_THREADS"')
    done = run(f"{program}.sh", "-H", hosts, "true", stubs=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{threads}\n"), done


def test_a_temporary_directory_that_was_checked_is_the_one_that_ranks_are_told(tmp_path: Path) -> None:
    stub(tmp_path, "mpirun", 'echo "$*"')
    done = run("mpirun.sh", "-np", "1", "true", stubs=tmp_path, TMPDIR=str(tmp_path))
    assert "-x TMPDIR " in done.stdout, done


def test_ranks_under_srun_get_more_than_what_sbatch_let_into_the_job(tmp_path: Path) -> None:
    stub(tmp_path, "srun", 'echo "$*"')
    job = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_EXPORT_ENV": "PATH"}
    done = run("srun.sh", "train", stubs=tmp_path, **job)
    assert "--export=ALL " in done.stdout and done.stdout.endswith(" --ntasks=2 train\n"), done


@pytest.mark.parametrize(
    ("scontrol", "code", "said"),
    [
        ('[[ $* == "show hostnames a[1-2]" ]] && printf "a1\\na2\\n"', 0, "-np 3 -H a1:2,a2:2 true"),
        ("exit 1", 2, "name hosts with -H"),
    ],
)
def test_horovodrun_is_told_the_nodes_of_a_slurm_job(tmp_path: Path, scontrol: str, code: int, said: str) -> None:
    stub(tmp_path, "scontrol", scontrol)
    stub(tmp_path, "ssh", "exec bash -s")
    stub(tmp_path, "horovodrun", 'echo "$*"')
    job = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "3"}
    done = run("horovodrun.sh", "true", stubs=tmp_path, **job)
    assert done.returncode == code and said in done.stdout + done.stderr, done


@pytest.mark.parametrize("command", ["{}/slurm.sbatch train", "{}/slurm.sbatch", "{}/slurm.sbatch a b /slurm.sbatch"])
def test_a_slurm_job_finds_its_clone_also_where_the_path_has_spaces(tmp_path: Path, command: str) -> None:
    launch = tmp_path / "my clone" / "launch"
    stub(launch, "restart", 'echo "$0 $*"')
    stub(tmp_path, "scontrol", f"printf 'JobId=1\\n   Command=%s\\n   WorkDir=/\\n' '{command.format(launch)}'")
    done = run("slurm.sbatch", "train", stubs=tmp_path, SLURM_JOB_ID="1")
    assert done.stdout == f"{launch}/restart --max-restarts 2 -- {launch}/mpirun.sh train --resume\n", done


def test_a_pbs_job_has_the_path_of_its_submitter(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("b\na\nb\n")
    stub(tmp_path / "launch", "restart", 'echo "$PATH: $*"')
    known = {"PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodes"), "TRAIN": "train --epochs 2"}
    path = f"/my/.venv/bin:{os.environ['PATH']}"
    for given, seen in (({"PBS_O_PATH": path}, path), ({}, f"{tmp_path}:{os.environ['PATH']}")):
        done = run("pbs.sh", stubs=tmp_path, **known, **given)
        words = "--max-restarts 2 --drop-dead-hosts -- launch/mpirun.sh -H a:1,b:2 train --epochs 2 --resume"
        assert done.stdout == f"{seen}: {words}\n", done


def test_every_line_of_files_for_an_image_is_one_source_and_one_destination() -> None:
    text = (LAUNCH / "apptainer.def").read_text().partition("%files\n")[2].partition("\n\n")[0]
    lines = [line.split() for line in text.splitlines()]
    assert {len(words) for words in lines} == {2}, lines
    assert all((ROOT / source).exists() for source, _ in lines)


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


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ("run -H a:1,b:1,c:1,d:1 x", "run -np 4 -H a:2,b:2,c:2 x"),
        ("run --hostfile FILE x", "run -np 3 -H a:3 x"),
        ("run -np 3 -H a:1,b:1,d:1 x", "run -np 3 -H a:2,b:2 x"),
        ("run --num-proc=2 --hosts=a:1,b:2,d:1 x", "run --num-proc=2 -H a:1,b:2 x"),
        ("run -H a:1,b:1 x", "run -H a:1,b:1 x"),
    ],
)
def test_the_number_of_ranks_is_the_same_without_a_dead_host(
    restarts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, moved: str
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nd\n")
    monkeypatch.setattr(restarts, "answers", lambda host: host != "d")
    command, dead = restarts.without_dead_hosts(given.replace("FILE", str(tmp_path / "hosts")).split())
    assert (command, dead) == (moved.split(), ["d"] if command != given.split() else [])


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


def test_a_hosts_name_is_judged_alike_by_every_launcher_and_by_the_doctor(
    tmp_path: Path, restarts: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{number}" for number in range(len(GOOD_HOSTS + BAD_HOSTS))]
    for file, host in zip(files, GOOD_HOSTS + BAD_HOSTS, strict=True):
        file.write_text(f"b:1\n{host}\n")
    script = "; ".join(f"(hvfreeze_arguments x -np 1 --hostfile {file} run); echo $?" for file in files)
    wanted = [0] * len(GOOD_HOSTS) + [2] * len(BAD_HOSTS)
    assert [*map(int, bash(script, LC_ALL="C.UTF-8").stdout.split())] == wanted
    for file, code in zip(files, wanted, strict=True):
        with contextlib.nullcontext() if code == 0 else pytest.raises(SystemExit, match="2"):
            assert len(restarts.hosts_of(["x", "-np", "1", "--hostfile", str(file), "run"])) == 2
        with contextlib.nullcontext() if code == 0 else pytest.raises(UsageError):
            assert len(read_hostfile(file)) == 2
    # In a process of its own: it ends all that is below the process it runs in.
    started = ["touch", str(tmp_path / "ran"), "-np", "1", "--hostfile", str(files[-1]), "--run-dir", str(tmp_path)]
    restarted = subprocess.run([LAUNCH / "restart", "--max-restarts=0", "--", *started], capture_output=True)
    assert restarted.returncode == 2 and not (tmp_path / "ran").exists()


def test_the_hosts_of_a_command_are_found_and_replaced(restarts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb # last\n")
    for words in (f"run --hostfile {tmp_path}/hosts x", "run -H a:2,b x", "run --hosts=a:2,b x"):
        assert restarts.hosts_of(words.split()) == {"a": 2, "b": 1}
        assert restarts.with_hosts(words.split(), {"b": 3}) == ["run", "-H", "b:3", "x"]
    assert restarts.hosts_of(["run", "x"]) == {}
    assert restarts.hosts_of(["run", "-H", "a:1,b:1,a:2", "x"]) == {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\n", "cannot be read: it is not text"),
        (b"", "names no host"),
        (b"# a\n\n", "names no host"),
    ],
)
def test_a_hostfile_that_names_no_hosts_is_refused_by_its_name(
    restarts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        restarts.hosts_of(["run", "--hostfile", str(tmp_path / "hosts"), "x"])
    assert ended.value.code == 2 and f"({tmp_path}/hosts) {why}" in capsys.readouterr().err


def restarted(script: str, *, attempts: int = 1) -> subprocess.CompletedProcess[str]:
    """What came of a job that bash starts through launch/restart ($0)."""
    command = ["bash", "-c", script, f"{LAUNCH}/restart --max-restarts {attempts - 1} --backoff 0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_hostfile_that_can_be_read_only_once_reaches_the_launcher(tmp_path: Path) -> None:
    job = f"""$0 -- echo --hostfile <(echo 'a slots=2'; echo b) --run-dir {tmp_path}"""
    done = restarted(job)
    assert done.stdout == f"-H a:2,b:1 --run-dir {tmp_path}\n", done
    assert json.loads((tmp_path / "restarts.jsonl").read_text())["hosts"] == {"a": 2, "b": 1}


def test_a_hostfile_that_is_gone_when_the_job_has_ended_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\n")
    done = restarted(f"$0 -- bash -c 'rm $1' job {tmp_path}/hosts --hostfile {tmp_path}/hosts --run-dir {tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "restarts.jsonl").read_text())["hosts"] == {"a": 1}


def test_a_record_that_cannot_be_written_leaves_the_jobs_code_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "restarts.jsonl").symlink_to("/dev/full")
    for name, why in (("file", "File exists"), ("full", "No space left on device")):
        done = restarted(f"$0 -- bash -c 'exit 7' job --run-dir {tmp_path}/{name}", attempts=2)
        said = f"launch/restart: {tmp_path}/{name}/restarts.jsonl cannot be written: {why}; continuing without it\n"
        assert (done.returncode, done.stderr.count(said), "Traceback" in done.stderr) == (7, 2, False), done
