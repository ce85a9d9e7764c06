"""The commands beside train."""

from __future__ import annotations

import argparse

from hvfreeze.errors import UsageError


def perform(command: str, options: argparse.Namespace) -> int:
    """Run a command and return its exit code; each imports only what it needs."""
    if command == "doctor":
        return diagnose(options)
    if command == "report":
        from hvfreeze.report.report import write_report

        return write_report(options.run_dirs, out=options.out)
    from hvfreeze.cache import commands

    return {"ls": commands.ls, "verify": commands.verify, "rm": commands.rm}[options.action](options.directory)


def diagnose(options: argparse.Namespace) -> int:
    """Check this machine, or the hosts that were named."""
    if options.hosts is None and options.hostfile is None:
        from hvfreeze.doctor.this_machine import run_doctor

        return run_doctor()
    from hvfreeze.doctor.hosts import parse_hosts, read_hostfile, run_hosts_doctor

    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("--hosts and --hostfile both name hosts; give one of them")
    hosts = parse_hosts(options.hosts) if options.hosts is not None else read_hostfile(options.hostfile)
    return run_hosts_doctor(hosts, data_dir=options.data_dir, cache_dir=options.cache_dir)
