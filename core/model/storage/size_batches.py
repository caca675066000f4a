"""Items in runs of a bounded size, such as tensors that go into one file or one buffer."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def runs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items whose sizes sum to `limit` at most, or one item that is larger."""
    run: list[T] = []
    total = 0
    for item in items:
        if run and total + size(item) > limit:
            yield run
            run, total = [], 0
        run.append(item)
        total += size(item)
    if run:
        yield run
