"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sabia.core import notes

# Triton reads it when it is imported, which torch.compile may do in any test of a process
os.environ["TRITON_INTERPRET"] = "1"
# outputs of equal rows are compared byte for byte
os.environ.setdefault("SABIA_RUN_RECORD", "0")

# files whose tests take minutes: begun first, so that no worker waits for them at the end
LONG = ("tests/gpu/test_dry_run.py", "tests/gpu/test_run.py")
COMPILED = ("numba", "triton", "inductor", "cuda")  # caches that tests may share


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; pytest-xdist keeps the order with --no-loadscope-reorder."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(autouse=True, scope="session")
def _own_cache_of_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An XDG_CACHE_HOME without calls of earlier tests; compiled code is that of the user."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sabia"
    own = tmp_path_factory.mktemp("cache")
    (own / "sabia").mkdir()
    for name in COMPILED:
        (users / name).mkdir(parents=True, exist_ok=True)
        (own / "sabia" / name).symlink_to(users / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture(autouse=True)
def _notes_of_no_command() -> None:
    """Messages are not those of a command that an earlier test of this process ran."""
    notes.configure("", quiet=False)
