from __future__ import annotations

import os
import sys

import pytest

from hvfreeze.doctor import this_machine as checks
from hvfreeze.doctor.libraries import Probe, mpi_name, probe, run_and_read
from hvfreeze.doctor.this_machine import CheckResult

HOROVOD = Probe(
    {"version": "0.28.1", "mpi_built": "yes", "built_with_torch": "2.13.0", "torch": "2.13.0", "mpi": "Open MPI 4.1.4"}
)
BROKEN = Probe(error="cannot open shared object file (exit 1)")


def but(facts: Probe, **changes: str) -> Probe:
    return Probe(facts.facts | changes)


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (checks.check_python((3, 9, 1), executable="python3"), "PROBLEM"),
        (checks.check_python((3, 10, 0), executable="python3"), "OK"),
        (checks.check_torch(BROKEN), "PROBLEM"),
        (checks.check_torch(Probe({"version": "2.9.1", "threads": "2", "capability": "AVX2"})), "PROBLEM"),
        (checks.check_torch(Probe({"version": "2.14.0+cpu", "threads": "2", "capability": "AVX2"})), "PROBLEM"),
        (checks.check_torchvision(BROKEN), "PROBLEM"),
        (checks.check_torchvision(Probe({"version": "0.28.0", "shim": ""})), "OK"),
        (checks.check_horovod(BROKEN), "PROBLEM"),
        (checks.check_horovod(but(HOROVOD, mpi_built="", mpi="")), "PROBLEM"),
        (checks.check_horovod_torch(BROKEN), "PROBLEM"),
        (checks.check_horovod_torch(but(HOROVOD, torch="2.12.0")), "PROBLEM"),
        (checks.check_mpirun("", error="mpirun is not on the PATH", horovod=HOROVOD), "PROBLEM"),
        (checks.check_mpirun("MPICH 4.0.2", error="", horovod=HOROVOD), "PROBLEM"),
        (checks.check_mpirun("Open MPI 4.1.6", error="", horovod=HOROVOD), "PROBLEM"),
        (checks.check_mpirun("Open MPI 4.1.4", error="", horovod=HOROVOD), "OK"),
        (checks.check_mpi4py(BROKEN, horovod=HOROVOD), "PROBLEM"),
        (checks.check_mpi4py(Probe({"version": "4.1.2", "mpi": "MPICH 4.0.2"}), horovod=HOROVOD), "PROBLEM"),
        (checks.check_mpi4py(Probe({"version": "4.1.2", "mpi": "Open MPI 4.1.4"}), horovod=HOROVOD), "OK"),
        (checks.check_hdf5(BROKEN), "PROBLEM"),
        (checks.check_hdf5(Probe({"version": "3.16.0", "hdf5": "2.0.0"})), "OK"),
        (checks.check_cores(2, local_size=4, yields=False), "note"),
        (checks.check_cores(2, local_size=4, yields=True), "OK"),
        (checks.check_room("memory", 2**29), "note"),
        (checks.check_room("disk", 2**30), "note"),
        (checks.check_room("shared memory", 2**30), "OK"),
        (checks.check_user(0, allowed=False), "note"),
        (checks.check_user(0, allowed=True), "OK"),
    ],
)
def test_each_check_tells_problems_from_notes_and_says_what_to_mend(check: CheckResult, verdict: str) -> None:
    assert check.verdict == verdict, check
    assert bool(check.remedy) == (verdict != "OK"), check


def test_a_torchvision_behind_stand_ins_is_told_to_fail_in_a_script() -> None:
    note = checks.check_torchvision(Probe({"version": "0.28.0", "shim": "yes"}))
    assert "`import torchvision` in your own script fails" in note.remedy


def test_the_table_puts_remedies_under_their_checks_and_notes_leave_the_machine_usable() -> None:
    fine, note, problem = (
        CheckResult("torch", True, "2.13.0"),
        CheckResult("b", True, "2", "do"),
        CheckResult("mpirun", False, "absent", "install it"),
    )
    assert checks.exit_code([fine, note]) == 0 and checks.exit_code([fine, note, problem]) == 3
    assert checks.table([]).startswith("This machine is usable")
    assert checks.table([problem], about="These hosts are").splitlines()[-1].startswith("These hosts are NOT usable")
    rows = checks.table([fine, problem]).splitlines()
    assert rows[0].split() == ["OK", "torch", "2.13.0"] and rows[1].split() == ["PROBLEM", "mpirun", "absent"]
    assert rows[2].split("-> ")[1] == "install it" and "NOT usable: 1 OK, 0 notes, 1 problem." in rows[3]


def test_processor_lists_what_is_there_and_what_is_not() -> None:
    there = checks.check_processor(frozenset({"avx2", "amx_bf16"})).value
    assert there == "AVX2, AMX bfloat16, no AVX512, no AVX512 bfloat16"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", "Open MPI 4.1.4"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI 4.1.4"),
        ("MPICH Version:      4.0.2\nMPICH Release date: ...", "MPICH 4.0.2"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "MPICH 4.0.2"),
        ("", ""),
    ],
)
def test_mpi_is_named_alike_by_launcher_and_library(text: str, name: str) -> None:
    assert mpi_name(text) == name


def test_a_library_that_crashes_is_silent_or_absent_is_an_error_in_words() -> None:
    assert run_and_read([sys.executable, "-c", "import os; os.abort()"])[1].endswith("(killed by signal 6)")
    assert run_and_read(["hvfreeze-no-such-program"]) == ("", "hvfreeze-no-such-program is not on the PATH")
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run_and_read(silent, timeout_seconds=0.2)[1].startswith("no answer within")


def test_libraries_are_probed_in_one_process_until_one_fails() -> None:
    found = probe("h5py", "no-such-library", "another")
    assert {name: each.error for name, each in found.items()} == {
        "h5py": "",
        "no-such-library": "KeyError: 'no-such-library' (exit 1)",
        "another": "KeyError: 'another' (exit 1)",
    }
    assert found["h5py"].facts.keys() == {"version", "hdf5"}


@pytest.mark.parametrize(("confirm", "verdict"), [("1", "OK"), ("0", "note"), (None, "note")])
def test_root_is_allowed_to_start_ranks_by_both_variables_alone(
    monkeypatch: pytest.MonkeyPatch, confirm: str | None, verdict: str
) -> None:
    allow, confirmed = checks.RUN_AS_ROOT
    monkeypatch.setenv(allow, "1")
    monkeypatch.delenv(confirmed, raising=False)
    if confirm is not None:
        monkeypatch.setenv(confirmed, confirm)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(checks, "probe", lambda *names: dict.fromkeys(names, BROKEN))
    monkeypatch.setattr(checks, "run_and_read", lambda command: ("", "absent"))
    (user,) = [check for check in checks.local_checks() if check.name == "user"]
    assert user.verdict == verdict


def test_doctor_finds_this_machine_usable(capsys: pytest.CaptureFixture[str]) -> None:
    code = checks.run_doctor()
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "PROBLEM" not in shown
    for name in ("torch", "torchvision", "Horovod", "mpirun", "mpi4py", "h5py", "cores", "shared memory"):
        assert name in shown
