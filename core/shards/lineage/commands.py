"""The commands that make outputs again, in order."""

import os
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from sabia.core.shards.job import without_ending
from sabia.core.shards.layout import REJECTS
from sabia.core.shards.lineage.graph import CURRENT, RUNS, Graph, Node

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
