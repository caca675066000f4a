"""The graph of outputs: which was made from which, and what is missing, stale or defective.

An output is stale if the results of its command have another version now (`core.results`), or if a
file that it was made from is not what it was. What is made from such an output is to be made again
after it. Nothing is executed, and of data files only sizes and digests are read.
"""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sabia.core.results import recorded_result, result_version
from sabia.core.shards.lineage.outputs_found import Output, outputs_below
from sabia.core.shards.lineage.run_record import identity_of
from sabia.core.shards.sources import origin_of

MISSING, STALE, AFTER, CURRENT = "missing", "stale", "after", "current"
RUNS = ("pretrain", "sft", "grpo")  # write a run directory


@dataclass
class Node:
    """An output in the graph. sources: paths of outputs that it was made from; leaves: of files and
    directories that no output is; rows_from: those of both whose rows it was made from, the others
    are models and the like; state: MISSING, STALE, AFTER (made from one that changes) or CURRENT;
    side: missing files that the command writes besides; changes: it will be another one when it is
    made again; discarded: because its inputs or the version of its results are others now."""

    output: Output
    sources: set[str] = field(default_factory=set)
    leaves: set[str] = field(default_factory=set)
    rows_from: set[str] = field(default_factory=set)
    state: str = CURRENT
    reasons: list[str] = field(default_factory=list)
    side: list[str] = field(default_factory=list)
    changes: bool = False
    discarded: bool = False


Graph = dict[str, Node]


def read_graph(folders: Sequence[str]) -> Graph:
    """The graph of all outputs below the folders, each after those that it was made from."""
    outputs = outputs_below(folders)
    producers = _Producers(outputs)
    graph = {path: Node(output) for path, output in outputs.items()}
    now = functools.cache(identity_of)
    for path, node in graph.items():
        for one in node.output.inputs():
            _add_edge(node, producers.of(one, path), one)
        rows = [(producers.of(one, path), one) for one in node.output.rows_from()]
        node.rows_from = {str(producer or one.get("name")) for producer, one in rows}
        node.rows_from &= node.sources | node.leaves
        _judge(node, now)
    graph = {path: graph[path] for path in _ordered(graph)}
    for node in graph.values():
        behind = [path for path in sorted(node.sources) if graph[path].changes]
        node.discarded = node.discarded or bool(behind)
        node.changes = node.changes or node.discarded
        if behind and node.state == CURRENT:
            node.state = AFTER
            node.reasons.append(f"made from {behind[0]}, which is {graph[behind[0]].state}")
    return graph


class _Producers:
    """Finds the output that a file is, is in, or was written by."""

    def __init__(self, outputs: Mapping[str, Output]) -> None:
        self.outputs = outputs
        self.writers = {
            name: path
            for path, output in outputs.items()
            for name in output.record.get("writes", ())
            if name not in outputs
        }
        self.origins = {origin_of(path): path for path in outputs}
        for path, output in outputs.items():
            self.origins |= {origin_of(shard.path): path for shard in output.shards}

    def of(self, one: Mapping[str, Any], consumer: str) -> str | None:
        """The path of an output; None for a file that no output is."""
        if "name" not in one:
            return self.origins.get(one.get("origin", ""))
        path = str(one["name"])
        while path not in ("/", ""):
            producer = path if path in self.outputs else self.writers.get(path)
            if producer is not None and producer != consumer:
                return producer
            path = os.path.dirname(path)
        return None


def _add_edge(node: Node, producer: str | None, one: Mapping[str, Any]) -> None:
    if producer is not None:
        node.sources.add(producer)
    elif "made" not in one and not str(one.get("name", "<")).startswith("<"):
        node.leaves.add(str(one["name"]))


def _judge(node: Node, now: object) -> None:
    """Set the state of a node by itself."""
    output = node.output
    missing, stale = _missing(output), list(_stale(output, now))
    node.discarded = bool(stale)
    node.changes = node.discarded or output.unfinished
    node.reasons = [*missing, *stale]
    if node.reasons:
        node.state = MISSING if missing else STALE
        return
    node.side = [path for path in output.record.get("writes", ()) if not os.path.exists(path)]


def _missing(output: Output) -> list[str]:
    if not os.path.exists(output.path):
        return ["deleted"]
    if output.unfinished:
        return ["the run is not finished"]
    if output.command in RUNS and os.path.isdir(output.path):
        model = os.path.join(output.path, "final", "config.json")
        return [] if os.path.exists(model) else ["final/ is missing"]
    missing = []
    for shard in output.shards:
        try:
            size = os.stat(shard.path).st_size
        except OSError:
            missing.append(f"{os.path.basename(shard.path)} is missing")
            continue
        if shard.size not in (None, size):
            missing.append(f"{os.path.basename(shard.path)} is not as it was written")
    return missing


def _stale(output: Output, now: object) -> Iterator[str]:
    for record in output.records():
        command = str(record.get("command"))
        if (number := recorded_result(record)) != result_version(command):
            yield f"results {number} of {command}, now {result_version(command)}"
    changed = [str(one["name"]) for one in output.inputs() if _changed(one, now)]
    for name in dict.fromkeys(changed):
        yield f"{name} has changed"


def _changed(one: Mapping[str, Any], now: Any) -> bool:
    """Whether an input that exists is not what it was."""
    if not one.get("content"):
        return False
    identity = now(str(one["name"]))
    return bool(identity) and identity != one["content"]


def _ordered(graph: Graph) -> list[str]:
    """Paths, each after its sources; outputs that were made from each other stay as they are."""
    ordered: dict[str, None] = {}
    left = dict.fromkeys(graph)
    while left:
        ready = [path for path in left if graph[path].sources <= ordered.keys() | {path}]
        for path in ready or list(left):
            ordered[path] = None
            left.pop(path)
    return list(ordered)


def descendants(graph: Graph, paths: Sequence[str]) -> list[str]:
    """The outputs that were made from those of `paths`, directly or not, in the graph's order."""
    reached = set(paths)
    for path, node in graph.items():
        if node.sources & reached:
            reached.add(path)
    return [path for path in graph if path in reached and path not in paths]
