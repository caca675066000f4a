"""The day on which planner tests take place: prices on file age, and no test may fail by that."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

DAY = datetime.date(2026, 11, 21)


class _Pinned(datetime.date):
    @classmethod
    def today(cls) -> datetime.date:
        return DAY


@contextmanager
def pinned() -> Iterator[None]:
    """Within it the planner takes DAY for today."""
    from sabia.core.plan import answer, request

    with mock.patch.object(answer, "date", _Pinned), mock.patch.object(request, "date", _Pinned):
        yield
