"""Read the data files (data/).

Every fact that changes over time (a chip's rate, a price) is data with a source and a date, never
code. tests/core/plan/test_data_files.py checks the keys of each entry: one without either, or with
an unknown key, fails there.
"""

import functools
import os
import tomllib
from typing import Any

DATA = os.path.join(os.path.dirname(__file__), "data")


@functools.cache
def read_data(name: str) -> dict[str, Any]:
    """The TOML file `name` of `data/`, parsed once; callers must not change it."""
    return tomllib.loads(read_text(name))


def read_text(name: str) -> str:
    """The text of the file `name` of `data/`."""
    with open(os.path.join(DATA, name), encoding="utf-8") as file:
        return file.read()
