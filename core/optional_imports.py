"""Imports of pandas by pyarrow, which no command needs.

pyarrow imports pandas, where it is installed, with the first array that it makes, to recognise its
objects: 0.3 CPU seconds of every process. A process that runs a command has pyarrow look once while
pandas cannot be imported; from then on it does without. Programs that import sabia are left alone.
"""

import sys

_process = {"ours": False}


def runs_a_command() -> None:
    """Say that this process runs a command; called before it imports pyarrow."""
    _process["ours"] = True


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=name)


def leave_out_pandas() -> None:
    """Have pyarrow do without pandas in a process that runs a command."""
    if _process["ours"] and "pandas" not in sys.modules:
        import pyarrow as pa

        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([0])
        finally:
            sys.meta_path.remove(_NoPandas)
