"""The ways in which a run can end badly, each with the exit code that scripts rely on."""

from __future__ import annotations

from typing_extensions import Self

EXIT_CODES = """exit codes:
  0 done   2 usage   3 data, cache or checkpoint refused   4 ranks diverged   5 numbers not finite   6 stall
  75 preempted by SIGUSR1, or a lone process by SIGTERM (go on with --resume)   130 interrupted (Ctrl-C)
  143 one of several ended by SIGTERM
"""


class HvfreezeError(Exception):
    """An expected failure: its message is all that the user sees, and `exit_code` is the job's exit code.

    `everywhere` tells that all ranks raise it at the same point, so that they can still leave together; otherwise the
    rank that raises it must end the job, because its peers wait for it.
    """

    exit_code = 1
    everywhere = False

    def on_all_ranks(self) -> Self:
        """Return this error, which all ranks raise at the same point."""
        self.everywhere = True
        return self


class UsageError(HvfreezeError):
    """An argument, a configuration key or the way of starting is wrong."""

    exit_code = 2


class ArgumentError(UsageError, ValueError):
    """An argument for which Horovod raises ValueError; scripts may catch it as such."""


class RefusedError(HvfreezeError):
    """Data, a cache or a checkpoint does not match what asks for it, or cannot be read or written."""

    exit_code = 3


class DivergedError(HvfreezeError):
    """Replicas that must be equal are not."""

    exit_code = 4
    everywhere = True


class NumericsError(HvfreezeError):
    """A loss, gradient or parameter is NaN or infinite."""

    exit_code = 5
    everywhere = True


class StallError(HvfreezeError):
    """A rank did not take part in a collective in time."""

    exit_code = 6


class Preempted(HvfreezeError):
    """The job was asked to leave, has written a checkpoint and can be resumed."""

    exit_code = 75
    everywhere = True
