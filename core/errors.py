"""What can go wrong, said in one line, and the exit code that belongs to it.

Every error that a user can cause or meet is a SabiaError: its message says what failed, the
value, what was expected and how to mend it; the command line prints it and exits with
`exit_code`. Anything else that reaches the command line is a defect of the program.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command (a few sysexits numbers, and 128 + signal)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INFEASIBLE = 3
    BAD_DATA = 65
    MISSING = 69
    INTERRUPTED = 75
    SIGINT = 130
    PIPE = 141


class SabiaError(Exception):
    """An error with a message for the user."""

    exit_code = ExitCode.FAILED


class Failed(SabiaError):
    """The work could not be done (1)."""


class UsageError(SabiaError):
    """The command line, a unit or a configuration value is wrong (2)."""

    exit_code = ExitCode.USAGE


class Infeasible(SabiaError):
    """No plan meets the constraints, or a gate is red (3)."""

    exit_code = ExitCode.INFEASIBLE


class BadData(SabiaError):
    """An input is corrupt, cut short, empty or of the wrong schema (65)."""

    exit_code = ExitCode.BAD_DATA


class MissingBackend(SabiaError):
    """A package or device that the request needs is absent (69)."""

    exit_code = ExitCode.MISSING


class Interrupted(SabiaError):
    """Stopped by a signal with all state saved; run again to resume (75)."""

    exit_code = ExitCode.INTERRUPTED
