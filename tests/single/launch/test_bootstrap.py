"""launch/bootstrap with a stand-in for Python and for the programs that system packages bring; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = (
    *("awk", "bash", "cat", "cp", "cut", "dirname", "env", "find", "flock", "grep", "head", "mkdir", "mktemp", "mv"),
    *("nproc", "printenv", "rm", "sed", "sh", "sha256sum", "sleep", "tail", "touch", "tr", "uname"),
)
FROM_PACKAGES = ("cmake", "g++", "make", "mpicxx", "mpirun", "ssh")
PYTHON = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in
    *"$FAILING"*) echo "a disk is full"; exit 9 ;;
    *'-m venv'*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo "#!$PWD/.venv/bin/python" >.venv/bin/pip ;;
    *'pip wheel'*)
        printenv CXX HOROVOD_WITH_MPI MAKEFLAGS >>"$CALLS"
        while [ "$1" != -w ]; do shift; done
        mkdir "$2"; touch "$2/horovod-0.28.1-cp311.whl" ;;
    *_base_executable*) echo "$HOME/bin/python3" ;;
    *'print("cp'*) echo cp311 ;;
    *'version("torch")'*) echo 2.13.0+cpu ;;
    *'hvfreeze doctor'*) echo "table of the doctor" ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A folder with a checkout and a PATH of its own."""

    folder: Path

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    def bootstrap(self, *, failing: str = "nothing fails", **variables: str) -> tuple[int, str, str]:
        """Runs the script; its exit code, what it said, and the calls of Python during this run."""
        calls = self.folder / "calls"
        calls.write_text("")
        env = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder), "CALLS": str(calls), "FAILING": failing}
        command = ["bash", "launch/bootstrap"]
        done = subprocess.run(
            command, cwd=self.checkout, env=env | variables, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr, calls.read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    for program in FROM_PACKAGES:
        (tmp_path / "bin" / program).write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    shutil.copytree(ROOT / "launch", tmp_path / "checkout" / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path / "checkout")
    return Machine(tmp_path)


def test_a_fresh_machine_goes_through_six_steps_to_the_doctor(machine: Machine) -> None:
    code, said, calls = machine.bootstrap(OMP_NUM_THREADS="999")
    assert code == 0, said
    assert [f"[{step}/6]" in said for step in range(1, 7)] == [True] * 6
    assert "building Horovod with MPI (about 2 minutes)... done in" in said
    assert said.index("[6/6]") < said.index("table of the doctor") < said.index("Ready after")
    assert f"{machine.checkout}/launch/cxx17\n1\n-j{len(os.sched_getaffinity(0))}\n" in calls


@pytest.mark.parametrize(
    ("code", "waits"), [("1", True), ("66", False), ("71", False)], ids=["locked", "no locks", "no locks left"]
)
def test_only_a_lock_that_another_set_up_holds_is_waited_for(machine: Machine, code: str, waits: bool) -> None:
    (machine.folder / "bin/flock").unlink()
    (machine.folder / "bin/flock").write_text(f'#!/bin/sh\n[ "$1" != -n ] || exit {code}\n[ {code} = 1 ]\n')
    (machine.folder / "bin/flock").chmod(0o755)
    done, said, _ = machine.bootstrap()
    assert (done, "Another set-up is running" in said, "Ready after" in said) == (0, waits, True), said


def test_a_second_run_does_nothing_and_a_changed_pin_or_script_sets_up_again_without_building(machine: Machine) -> None:
    machine.bootstrap()
    assert machine.bootstrap() == (0, "", "")
    for changed in ("launch/requirements.txt", "launch/requirements-dev.txt", "setup.py", "launch/cxx17"):
        with (machine.checkout / changed).open("a") as file:
            file.write("# changed\n")
        code, said, calls = machine.bootstrap()
        assert code == 0 and "Ready after" in said, said
        assert "-m venv" not in calls and "pip wheel" not in calls, changed


def test_another_clone_takes_the_kept_wheel_and_another_mpi_builds_another(machine: Machine) -> None:
    machine.bootstrap()
    shutil.rmtree(machine.checkout / ".venv")
    code, said, calls = machine.bootstrap()
    assert code == 0 and "Horovod with MPI (built before)" in said, said
    kept = machine.folder / ".cache/hvfreeze/wheels"
    assert f"--force-reinstall {kept}/horovod-0.28.1-torch-2.13.0+cpu-openmpi-4.1.4-cp311-" in calls
    (machine.folder / "bin/mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.7'\n")
    code, said, calls = machine.bootstrap()
    assert code == 0 and "pip wheel" in calls, said
    assert len(list(kept.glob("horovod-*"))) == 2


def test_a_moved_checkout_gets_a_new_environment(machine: Machine) -> None:
    machine.bootstrap()
    machine.checkout.rename(machine.folder / "moved")
    (machine.folder / "checkout").symlink_to("moved")
    _, _, calls = machine.bootstrap(PWD=str(machine.folder / "moved"))
    assert "-m venv .venv" in calls


def test_index_arguments_reach_torch_and_torchvision_only(machine: Machine) -> None:
    _, _, calls = machine.bootstrap(TORCH_INDEX_ARGS="--index-url file:///some/index")
    with_index = [line for line in calls.splitlines() if "--index-url file:///some/index" in line]
    assert [line.split(" --disable")[0].split()[-1] for line in with_index] == ["torch==2.13.0", "torchvision==0.28.0"]


def test_missing_system_packages_without_an_administrator_end_with_the_exact_command(machine: Machine) -> None:
    for program in ("mpirun", "g++"):
        (machine.folder / "bin" / program).unlink()
    code, said, calls = machine.bootstrap()
    assert code == 1
    assert "sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ openmpi-bin\n" in said
    assert "-m" not in calls


@pytest.mark.parametrize(
    ("failing", "step", "remedy"),
    [
        ("-m venv", "[2/6] virtual environment", "Remove .venv/"),
        ("requirements-dev", "[3/6] libraries", "Check the network"),
        ("torchvision==", "[4/6] PyTorch", "TORCH_INDEX_ARGS"),
        ("pip wheel", "[5/6] building Horovod", "missing compiler"),
        ("-e .", "[6/6] hvfreeze itself", "setup.py"),
    ],
)
def test_a_failed_step_names_itself_shows_the_log_and_says_what_to_do(
    machine: Machine, failing: str, step: str, remedy: str
) -> None:
    code, said, _ = machine.bootstrap(failing=failing)
    assert code == 1
    failed, _, advice = said.partition("FAILED: ")[2].partition("What to do: ")
    assert failed.startswith(step)
    assert "a disk is full" in failed
    assert remedy in advice
    assert "Ready" not in said


def test_a_failed_build_keeps_no_wheel_and_the_next_run_builds(machine: Machine) -> None:
    machine.bootstrap(failing="pip wheel")
    assert list((machine.folder / ".cache/hvfreeze/wheels").iterdir()) == []
    code, said, calls = machine.bootstrap()
    assert code == 0, said
    assert "pip wheel" in calls


def test_a_problem_that_the_doctor_finds_stops_the_set_up(machine: Machine) -> None:
    code, said, _ = machine.bootstrap(failing="hvfreeze doctor")
    assert code == 1
    assert "Set-up stopped" in said
    code, said, _ = machine.bootstrap()
    assert "Ready after" in said


@pytest.mark.parametrize(
    ("asked", "built"),
    [
        (["-std=gnu++14", "-O2"], ["-std=gnu++17", "-O2"]),
        (["-g", "-std=c++14", "a b.cc"], ["-std=gnu++17", "a b.cc"]),
        (["-std=c++20", "-o", ""], ["-std=c++20", "-o", ""]),
    ],
)
def test_compiler_wrapper_changes_the_standard_drops_debugging_and_nothing_else(
    asked: list[str], built: list[str]
) -> None:
    env = {"HVFREEZE_CXX": "printf", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run([ROOT / "launch/cxx17", "%s\n", *asked], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[:-1] == built
