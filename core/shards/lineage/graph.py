"""The graph of outputs: which was made from which, and what is missing, stale or defective.

An output is stale if the results of its command have another version now (`core.results`), or if a
file that it was made from is not what it was. What is made from such an output is to be made again
after it. Nothing is executed, and of data files only sizes and digests are read. From the graph
follow the commands that make outputs again, in order.
"""

import functools
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sabia.core.results import recorded_result, result_version
from sabia.core.shards.job import without_ending
from sabia.core.shards.layout import REJECTS
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


WITH_ROWS = (*RUNS, "quantize")  # write rows to stdout, too


def commands_for(graph: Graph, paths: Collection[str]) -> list[str]:
    """The command lines for these outputs, each once, inputs before what is made from them."""
    lines = [line for path, node in graph.items()
             if path in paths and (line := command_of(node, graph))]  # fmt: skip
    return list(dict.fromkeys(lines))


def commands_to_rebuild(graph: Graph) -> list[str]:
    """The command lines for all outputs that are not current, and for missing files beside them."""
    lines: list[str] = []
    for node in graph.values():
        if node.state != CURRENT or node.side:
            force = node.state == CURRENT and _stats_missing(node)
            lines.append(command_of(node, graph, force))
    forced = {line.replace(" --force", "") for line in lines if " --force" in line}
    return list(dict.fromkeys(line for line in lines if line and line not in forced))


def command_of(node: Node, graph: Graph, force: bool = False) -> str:
    """The command line that makes an output; '' if its record does not have one. Commands that also
    write rows to stdout write them where the call did, if that is known."""
    record = node.output.record
    if "arguments" not in record:
        return ""
    # what came through a pipe has no name: a call with other rows must be told to replace an output
    piped = any("made" in one for one in record.get("inputs", ()))
    out = str(record.get("out") or "")
    # nor does a call whose rows are complete look for its rejects; a crawl would begin anew
    rejects = without_ending(node.output.path).endswith(REJECTS) and not os.path.exists(
        f"{out}.crawl"
    )
    # a run directory is only begun anew when told so
    another = node.output.command in RUNS and node.discarded
    force = force or ((piped or rejects or another) and os.path.exists(out))
    line = shell(record, force)
    folder = str(record.get("folder", ""))
    target = ""
    if record.get("stdout") or not record.get("out"):
        target = node.output.path
    elif node.output.command in WITH_ROWS:
        target = next((path for path, one in graph.items() if _same_call(one, node)), "/dev/null")
    if target:
        shown = target if target == "/dev/null" else os.path.relpath(target, folder)
        line += f" > {shlex.quote(shown)}"
    return line if folder == os.getcwd() else f"cd {shlex.quote(folder)} && {line}"


def _same_call(one: Node, node: Node) -> bool:
    """Whether a file is the stdout of the call that made an output."""
    first, second = one.output.record, node.output.record
    names = ("command", "arguments", "folder")
    return bool(first.get("stdout")) and all(first.get(n) == second.get(n) for n in names)


def shell(record: Mapping[str, Any], force: bool = False) -> str:
    """The command line of a record, with those that are piped into it."""
    program = record.get("program") or ["sabia", *str(record["command"]).split()]
    words = [*program, *(["--force"] if force else []), *record["arguments"]]
    line = shlex.join(words)
    piped = [shell(one["made"]) for one in record.get("inputs", ()) if "made" in one]
    return " | ".join([*piped, line])


def _stats_missing(node: Node) -> bool:
    """Whether the missing file has figures of the work, which only doing it again gives; a crawl
    has them in its state."""
    arguments = node.output.record.get("arguments", ())
    asked = "--stats" in arguments and node.output.command != "crawl"
    folder = str(node.output.record.get("folder", ""))
    named = {os.path.join(folder, word) for word in arguments}
    return asked and any(path in named and path.endswith(".json") for path in node.side)
