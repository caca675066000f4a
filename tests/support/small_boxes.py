"""Boxes with small limits, and the processes of a box."""

from pathlib import Path

from sabia.core.sandbox.isolated import METHODS, Box


def small_box(*methods):
    """A box with small limits."""
    return Box(1, 1 << 28, 30.0, methods or METHODS)


def descendants(pid):
    """The processes below a process."""
    found = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return found
    for child in children:
        found += [int(child), *descendants(int(child))]
    return found
