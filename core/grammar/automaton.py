"""Automata: a grammar and the bytes so far → the bytes that may follow.

A state is the set of all ways to read the bytes so far; a way is a list of the nodes that are still
to be read (the continuation). States are made when they are reached, and their transitions are kept
in one table. From each state the shortest rest is known, so that a text can be ended in time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sabia.core.grammar.nodes import Alt, Bytes, Node, Ref, Repeat, Seq

ALL_BYTES = (1 << 256) - 1
DEAD, UNSEEN = -1, -2  # of a transition: there is none; it is not known yet
INFINITE = float("inf")
MOST_STATES = 1 << 15
DEEP = 400  # nodes still to be read, from which on the shortest choices are made


class Way:
    """Nodes that are still to be read: `node`, then those of `rest`; `cost` is the least number of
    bytes of their texts."""

    __slots__ = ("cost", "depth", "heads", "longer", "node", "rest")

    def __init__(self, node: Node | None, rest: Way | None, cost: float) -> None:
        self.node, self.rest, self.cost = node, rest, cost
        self.depth: int = rest.depth + 1 if rest is not None else 0
        self.longer: dict[Node, Way] = {}
        self.heads: list[tuple[int, Way]] | None = None  # bytes that may come next, what follows


State = frozenset[Way]


class Automaton:
    """The automaton of a grammar; not safe for several threads.

    available: the bytes that can be written alone, as bits; texts consist of them.
    """

    _rests: np.ndarray

    def __init__(self, root: Node, available: int = ALL_BYTES) -> None:
        self._root, self._costs = root, _costs(root, available)
        self._clear()

    @property
    def shortest(self) -> float:
        """Bytes of the shortest text; infinite if there is none."""
        return self.shortest_rest(self.start)

    def shortest_rest(self, state: State) -> float:
        """The least number of bytes that complete the text."""
        return min((way.cost for way in state), default=INFINITE)

    def accepts(self, state: State) -> bool:
        """Whether the text may end here."""
        return self.shortest_rest(state) == 0

    def complete(self, state: State) -> bool:
        """Whether no byte can follow."""
        return not any(self._heads(way) for way in state)

    def after(self, state: State, text: bytes) -> State | None:
        """The state after more bytes; None if the grammar has no such text."""
        number = self.number(state)
        for byte in text:
            self.fill([number])
            number = int(self.table[number, byte])
            if number == DEAD:
                return None
        return self._states[number]

    def number(self, state: State) -> int:
        """The row of the state in `table`, until the next call."""
        if len(self._states) > MOST_STATES:
            self._clear()
        return self._number(state)

    def fill(self, numbers: Iterable[int]) -> None:
        """Compute the transitions of these rows of the table."""
        for number in numbers:
            if self.table[number, 0] == UNSEEN:
                row = self._row(self._states[number])  # may replace the table
                self.table[number] = row

    def rests(self) -> np.ndarray:
        """The shortest rest of each row of the table, float32[states]."""
        if len(self._rests) < len(self._states):
            more = [self.shortest_rest(state) for state in self._states[len(self._rests) :]]
            self._rests = np.concatenate([self._rests, np.array(more, np.float32)])
        return self._rests

    def _clear(self) -> None:
        """Forget all states; those that a caller holds stay usable."""
        self.start: State = frozenset([self._way(self._root, Way(None, None, 0))])
        self.table = np.full((64, 256), UNSEEN, np.int32)
        self._states = list[State]()
        self._numbers: dict[State, int] = {}
        self._rests = np.zeros(0, np.float32)

    def _number(self, state: State) -> int:
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self._states)
            self._states.append(state)
            if number == len(self.table):
                self.table = np.concatenate([self.table, np.full_like(self.table, UNSEEN)])
        return number

    def _row(self, state: State) -> np.ndarray:
        """The transitions of a state, int32[256]."""
        classes: list[tuple[int, tuple[Way, ...]]] = [(ALL_BYTES, ())]  # bytes with equal targets
        for values, target in (head for way in state for head in self._heads(way)):
            split = list[tuple[int, tuple[Way, ...]]]()
            for members, targets in classes:
                if members & values:
                    split.append((members & values, (*targets, target)))
                if members & ~values:
                    split.append((members & ~values, targets))
            classes = split
        row = np.full(256, DEAD, np.int32)
        for members, targets in classes:
            if targets:
                bits = np.frombuffer(members.to_bytes(32, "little"), np.uint8)
                row[np.unpackbits(bits, bitorder="little").astype(bool)] = self._number(
                    frozenset(targets)
                )
        return row

    def _way(self, node: Node, rest: Way, cost: float | None = None) -> Way:
        """`node`, whose cost is given where it is known, then the rest; equal ways are one
        object."""
        if isinstance(node, Seq) and node.start == len(node.items):
            return rest
        way = rest.longer.get(node)
        if way is None:
            cost = self._cost(node) if cost is None else cost
            way = rest.longer[node] = Way(node, rest, cost + rest.cost)
        return way

    def _heads(self, way: Way) -> list[tuple[int, Way]]:
        """The bytes that may come next, each set with what follows; only ways that have an end."""
        if way.heads is not None:
            return way.heads
        heads, seen = list[tuple[int, Way]](), {way}
        todo = [way] if way.cost < INFINITE else []
        while todo:
            one = todo.pop()
            if one.rest is None:
                continue
            if isinstance(one.node, Bytes):
                heads.append((one.node.values, one.rest))
                continue
            for more in self._opened(one, one.rest):
                if more not in seen and more.cost < INFINITE:
                    seen.add(more)
                    todo.append(more)
        way.heads = heads
        return heads

    def _opened(self, way: Way, rest: Way) -> list[Way]:
        """The ways that a way with a rest begins with; past DEEP only the shortest."""
        node, deep = way.node, rest.depth > DEEP
        if isinstance(node, Seq):
            first = node.items[node.start]
            tail_cost = way.cost - rest.cost - self._cost(first)
            return [self._way(first, self._way(node.tail, rest, tail_cost))]
        if isinstance(node, Ref):
            return [self._way(node.target, rest)]
        if isinstance(node, Alt):
            least = self._cost(node)
            return [self._way(i, rest) for i in node.items if not deep or self._cost(i) == least]
        assert isinstance(node, Repeat), "the other kinds of nodes are above"
        ways = list[Way]()
        if not node.least:
            ways.append(rest)
        if node.most != 0 and not (deep and ways):
            ways.append(self._way(node.item, self._way(node.less, rest)))
        return ways

    def _cost(self, node: Node) -> float:
        """The least number of bytes of a text of the node."""
        if isinstance(node, Repeat):  # also of what is left of one
            return node.least * self._cost(node.item) if node.least else 0
        return self._costs[node]


def _costs(root: Node, available: int) -> dict[Node, float]:
    """The least number of bytes of each node's texts, as the least solution of their equations."""
    parents: dict[Node, list[Node]] = {root: []}
    todo = [root]
    while todo:
        node = todo.pop()
        for child in _children(node):
            if child not in parents:
                parents[child] = []
                todo.append(child)
            parents[child].append(node)
    costs = dict.fromkeys(parents, INFINITE)
    todo = list(parents)
    while todo:
        node = todo.pop()  # what was reached last, mostly below the others
        cost = _cost_of(node, costs, available)
        if cost < costs[node]:
            costs[node] = cost
            todo += parents[node]
    return costs


def _children(node: Node) -> list[Node]:
    if isinstance(node, Seq | Alt):
        return list(node.items)
    if isinstance(node, Repeat):
        return [node.item]
    return [node.target] if isinstance(node, Ref) else []


def _cost_of(node: Node, costs: dict[Node, float], available: int) -> float:
    if isinstance(node, Bytes):
        return 1 if node.values & available else INFINITE
    if isinstance(node, Alt):
        return min((costs[item] for item in node.items), default=INFINITE)
    if isinstance(node, Repeat):
        return node.least * costs[node.item] if node.least else 0
    return sum(costs[item] for item in _children(node))
