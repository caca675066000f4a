"""All planner tests take place on one day."""

from collections.abc import Iterator

import pytest
from pinned_day import pinned


@pytest.fixture(autouse=True)
def one_day() -> Iterator[None]:
    """Pin today for every test of this folder."""
    with pinned():
        yield
