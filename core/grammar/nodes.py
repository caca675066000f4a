"""Grammars over bytes: what a text may be, as a tree of nodes.

A node is one byte of a set, a sequence, a choice, a repetition, or a reference to another node, by
which a grammar is recursive. Nodes are compared by identity, so that automata can be kept by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property


class Node:
    """A set of texts."""


class Bytes(Node):
    """One byte. values: the possible ones, as bits of an integer."""

    def __init__(self, values: int) -> None:
        self.values = values


class Seq(Node):
    """The texts of the items, one after another, from item `start` on."""

    def __init__(self, items: Sequence[Node], start: int = 0) -> None:
        self.items, self.start = items, start

    @cached_property
    def tail(self) -> Seq:
        """The sequence without its first item."""
        return Seq(self.items, self.start + 1)


class Alt(Node):
    """A text of one of the items."""

    def __init__(self, items: Sequence[Node]) -> None:
        self.items = items


class Repeat(Node):
    """`least` to `most` texts of the item, one after another; most None: without a limit."""

    def __init__(self, item: Node, least: int = 0, most: int | None = None) -> None:
        self.item, self.least, self.most = item, least, most

    @cached_property
    def less(self) -> Repeat:
        """What is left of the repetition after one text of the item."""
        if self.most is None and not self.least:
            return self
        most = None if self.most is None else self.most - 1
        return Repeat(self.item, max(self.least - 1, 0), most)


class Ref(Node):
    """The texts of another node, which is set when that is made."""

    target: Node


EMPTY: Node = Seq(())


@cache
def byte_set(values: int) -> Bytes:
    """The node of a set of bytes."""
    return Bytes(values)


def byte_range(low: int, high: int) -> Bytes:
    """One byte of low..high."""
    return byte_set((1 << (high + 1)) - (1 << low))


def literal(text: str) -> Node:
    """This text, in UTF-8."""
    return Seq(tuple(byte_range(code, code) for code in text.encode()))


def optional(item: Node) -> Node:
    """A text of the item, or nothing."""
    return Repeat(item, 0, 1)


def seq(*items: Node) -> Node:
    """The texts of the items, one after another."""
    return items[0] if len(items) == 1 else Seq(items)


def alt(*items: Node) -> Node:
    """A text of one of the items."""
    return items[0] if len(items) == 1 else Alt(items)


def until(mark: str) -> Node:
    """Any bytes up to the first occurrence of a text, which ends them (Knuth, Morris and Pratt
    1977)."""
    text = mark.encode()
    states = [Ref() for _ in text]
    for number, state in enumerate(states):
        targets: dict[int, int] = {}  # of the bytes that the mark begins with, by matched length
        for byte in set(text):
            seen = text[:number] + bytes([byte])
            length = next(n for n in range(len(seen), -1, -1) if seen.endswith(text[:n]))
            targets[length] = targets.get(length, 0) | 1 << byte
        others = (1 << 256) - 1 - sum(1 << byte for byte in set(text))
        targets[0] = targets.get(0, 0) | others
        state.target = alt(*(
            byte_set(values) if length == len(text) else seq(byte_set(values), states[length])
            for length, values in targets.items()
        ))  # fmt: skip
    return states[0]
