"""What travels between commands: record schemas, Parquet in and out, and the executor.

The names below are the room's door; they are loaded when first used, because a command's
`--help` must import neither numpy nor pyarrow.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Job": "job",
    "Source": "sources",
    "ShardContext": "mapping",
    "Summary": "summary",
    "open_inputs": "inputs",
    "open_output": "outputs",
    "run_map": "mapping",
    "is_current": "manifest",
    "atomic_path": "atomic",
    "write_atomic": "atomic",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
