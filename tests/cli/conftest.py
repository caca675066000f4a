"""Commands that share a process with the libraries loaded, for the tests of a file."""

from collections.abc import Iterator

import pytest
from training_cases import Commands


@pytest.fixture(scope="module")
def sabia(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Calls of `sabia`, each in a fork of one process."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()
