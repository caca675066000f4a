"""Files named by options, and the error message for a file that cannot be read."""

import tomllib
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError

MOST_LETTERS = 1 << 24  # of a TOML file
MOST_PATH = 200  # letters of a path or a reason in an error


def unreadable(option: str, path: str | Path, error: OSError) -> UsageError:
    """The error for a file of an option: '--task: a.toml: No such file or directory'."""
    return UsageError(f"{option}: {path}: {error.strerror or error}")


def read_toml(option: str, path: str | Path, hint: str = "") -> dict[str, Any]:
    """The keys of a TOML file that an option names; `hint` ends the error for another format.

    Raises UsageError, also on more than MOST_LETTERS (a device without end).
    """
    where = f"{option}: {str(path)[:MOST_PATH]}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_LETTERS + 1)
        if len(text) <= MOST_LETTERS:
            return tomllib.loads(text)
        reason = "is longer than 16 MB"
    except OSError as error:
        raise unreadable(option, str(path)[:MOST_PATH], error) from error
    except (RecursionError, ValueError) as error:  # of UTF-8, TOML, and a zero byte in the path
        reason = str(error)[:MOST_PATH]
    raise UsageError(f"{where}: {reason} (expected TOML){hint}")
