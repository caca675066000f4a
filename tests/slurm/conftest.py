"""The Slurm that all tests of this folder share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_node import OneNode, what_is_missing


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneNode]:
    """One node, while any test needs it; skips with a word why where there can be none."""
    missing = what_is_missing()
    if missing:
        pytest.skip(missing)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with OneNode(tmp_path_factory.mktemp("slurm")) as running:
        yield running
