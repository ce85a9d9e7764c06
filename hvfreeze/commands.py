"""The commands beside train."""

from __future__ import annotations

import argparse


def perform(command: str, options: argparse.Namespace) -> int:
    """Run a command and return its exit code; each imports only what it needs."""
    if command == "doctor":
        from hvfreeze.doctor import run_doctor

        return run_doctor()
    if command == "report":
        from hvfreeze.report import write_report

        return write_report(options.run_dirs, out=options.out)
    from hvfreeze.cache import commands

    return {"ls": commands.ls, "verify": commands.verify, "rm": commands.rm}[options.action](options.directory)
