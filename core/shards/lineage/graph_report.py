"""The graph of outputs as text: one line for each, with its state, rows and time, below it what it
was made from; then the commands that make again what is missing or stale."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from sabia.core import units
from sabia.core.shards.job import Job
from sabia.core.shards.lineage.graph import (
    CURRENT,
    Graph,
    Node,
    command_of,
    commands_to_rebuild,
    read_graph,
)
from sabia.core.shards.lineage.outputs_found import upstream
from sabia.core.shards.lineage.run_record import ROWS

SHOWN = 4  # names in a line
MARKS = {"missing": "✗", "stale": "!", "after": "·", "current": " "}


def run(job: Job) -> None:
    """Print the graph below the job's inputs, as JSON with `--json`. Raises UsageError."""
    graph = read_graph(job.inputs or (".",))
    commands = commands_to_rebuild(graph)
    if job.json:
        outputs = [_as_json(path, graph) for path in graph]
        print(json.dumps({"outputs": outputs, "commands": commands}))
        return
    print("\n".join(lines_of(graph)))
    if commands:
        print("\nmake them again:", *commands, sep="\n  ")


def lines_of(graph: Graph) -> list[str]:
    """The outputs, each after those that it was made from."""
    if not graph:
        return ["no outputs"]
    lines = []
    for path, node in graph.items():
        figures = _figures(node)
        lines.append(f"{MARKS[node.state]} {_short(path)}  {', '.join(figures)}".rstrip())
        stages = [str(one["command"]) for one in reversed(list(upstream(node.output.record)))]
        through = " | ".join([*stages, node.output.command])
        made_from = [*sorted(node.sources), *_folded(sorted(node.leaves))]
        lines.append(f"    {through} ← {_listed(made_from) or 'nothing that is known'}")
        lines += [f"    {node.state}: {_listed(node.reasons)}"] if node.reasons else []
        lines += [f"    missing beside it: {_listed(node.side)}"] if node.side else []
    count = sum(node.state != CURRENT for node in graph.values())
    lines.append(f"{len(graph):,} outputs, {count:,} to make again")
    return lines


def _figures(node: Node) -> list[str]:
    """Rows, shards, version, time and place of an output, as far as it tells."""
    figures, totals = [], node.output.totals
    first = node.output.shards[0].record if node.output.shards else {}
    own = {**first, **node.output.record, **totals}
    if counts := row_counts(node):
        rows = [f"{counts[name]:,} {name.removeprefix('rows_')}"
                for name in ROWS if counts.get(name)]  # fmt: skip
        figures.append("rows " + " ".join(rows) if rows else "no rows")
    if node.output.shards:
        figures.append(f"{len(node.output.shards):,} shards")
    if own.get("cpu_seconds"):
        figures.append(f"{units.format_duration(own['cpu_seconds'])} CPU")
    if own.get("end"):
        hosts = own.get("hosts") or [own.get("host")]
        figures.append(f"{str(own['end'])[:16]} on {_listed(list(map(str, hosts)))}")
    if version := own.get("version"):
        figures.append(f"sabia {version} {str(own.get('commit') or '')[:9]}".rstrip())
    return figures


def row_counts(node: Node) -> Mapping[str, int]:
    """Rows of an output, summed over its shards."""
    if not node.output.shards:
        return node.output.record.get("rows") or {}
    sums = Counter[str]()
    for shard in node.output.shards:
        sums.update(shard.counts)
    return sums


def _folded(paths: Sequence[str]) -> list[str]:
    """Files of one folder as one entry."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folders.setdefault(os.path.dirname(path), []).append(path)
    return [f"{folder}/ ({len(names):,} files)" if len(names) > SHOWN else name
            for folder, names in folders.items()
            for name in (names if len(names) <= SHOWN else names[:1])]  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(map(_short, names[:SHOWN])) + more


def _short(text: str) -> str:
    """A path below the current folder without that."""
    return text.replace(f"{os.getcwd()}/", "")


def _as_json(path: str, graph: Graph) -> dict[str, object]:
    node = graph[path]
    record = {k: v for k, v in node.output.record.items() if k not in ("inputs", "reads", "moved")}
    return {
        "path": path,
        "state": node.state,
        "reasons": node.reasons,
        "missing_beside": node.side,
        "made_from": sorted(node.sources),
        "inputs": sorted(node.leaves),
        "command_line": command_of(node, graph),
        "shards": len(node.output.shards),
        "rows": dict(row_counts(node)),
        "record": record,
    }
