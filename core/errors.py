"""Errors with a message for the user, and exit codes.

Every error that a user can cause or encounter is a SabiaError. Its message states what failed, the
value, what was expected and how to fix it; the command line prints the message and exits with
`exit_code`. Any other exception that reaches the command line is an internal error.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands (65, 69 and 75 as in sysexits.h, and 128 + signal)."""

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
    """The work failed (1)."""


class UsageError(SabiaError):
    """The command line, a unit or a configuration value is wrong (2)."""

    exit_code = ExitCode.USAGE


class Infeasible(SabiaError):
    """No plan meets the constraints, or a limit is exceeded (3)."""

    exit_code = ExitCode.INFEASIBLE


class GateClosed(Infeasible):
    """A model fell by more than a gate allows (3)."""


class BadData(SabiaError):
    """An input is corrupt, truncated or empty, or has the wrong schema (65)."""

    exit_code = ExitCode.BAD_DATA


class MissingBackend(SabiaError):
    """A required package or device is missing (69)."""

    exit_code = ExitCode.MISSING


class Unavailable(Failed):
    """A server that has answered this run answers no more; the same command resumes (75)."""

    exit_code = ExitCode.INTERRUPTED


class Interrupted(SabiaError):
    """Stopped by a signal after saving all state; the same command resumes (75)."""

    exit_code = ExitCode.INTERRUPTED
