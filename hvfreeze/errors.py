"""Errors of hvfreeze, each with an exit code that scripts may rely on."""

from __future__ import annotations

from typing_extensions import Self

EXIT_CODES = """exit codes:
  0 success   2 usage error   3 data, cache or checkpoint refused   4 ranks diverged   5 NaN or Inf   6 stall
  75 preempted: SIGUSR1, or SIGTERM to a single process (continue with --resume)   130 interrupted (Ctrl-C)
  143 SIGTERM to one of several processes
"""


class HvfreezeError(Exception):
    """An expected failure: its message is all that the user sees, and `exit_code` is the job's exit code.

    `everywhere` is True if all ranks raise it at the same point, so that they can leave together; otherwise the rank
    that raises it must end the job, because its peers wait for it.
    """

    exit_code = 1
    everywhere = False

    def on_all_ranks(self) -> Self:
        """Return this error, marked as raised by all ranks at the same point."""
        self.everywhere = True
        return self

    def on_this_rank(self) -> Self:
        """Return this error, marked as raised by this rank only, which ends the job."""
        self.everywhere = False
        return self


class UsageError(HvfreezeError):
    """An argument, a setting or the way of starting is invalid."""

    exit_code = 2


class ArgumentError(UsageError, ValueError):
    """An argument for which Horovod raises ValueError, so that scripts can catch it as one."""


class RefusedError(HvfreezeError):
    """Data, a cache or a checkpoint does not match the run, or cannot be read or written."""

    exit_code = 3


class DivergedError(HvfreezeError):
    """Replicas that must be equal differ."""

    exit_code = 4
    everywhere = True


class NumericsError(HvfreezeError):
    """A loss, gradient or parameter is NaN or Inf."""

    exit_code = 5
    everywhere = True


class StallError(HvfreezeError):
    """A rank did not take part in a collective in time."""

    exit_code = 6


class Preempted(HvfreezeError):
    """The job was asked to leave, has written a checkpoint and can be resumed."""

    exit_code = 75
    everywhere = True
