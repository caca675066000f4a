"""Files named by options, and the error message for a file that cannot be read."""

import tomllib
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError


def unreadable(option: str, path: str | Path, error: OSError) -> UsageError:
    """The error for a file of an option: '--task: a.toml: No such file or directory'."""
    return UsageError(f"{option}: {path}: {error.strerror or error}")


def read_toml(option: str, path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file that an option names. Raises UsageError."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise unreadable(option, path, error) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: {path}: {error} (expected TOML)") from error
