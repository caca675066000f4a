"""Outputs that code with a known defect made, and everything that was made from them.

`known_defects.toml`, in this folder, lists the defects: `stage`, `results` (the versions of its
results, see `core.results`), `wrong` (one sentence), and `options` if only outputs with these
resolved options are affected.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from sabia.core.errors import Infeasible
from sabia.core.results import recorded_result
from sabia.core.shards.job import Job
from sabia.core.shards.lineage.graph import Graph, commands_for, descendants, read_graph
from sabia.core.shards.lineage.outputs_found import Output

FILE = "known_defects.toml"


@dataclass(frozen=True)
class Defect:
    """One known defect."""

    stage: str
    results: tuple[int, ...]
    wrong: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def made(self, record: Mapping[str, Any]) -> bool:
        """Whether a call with this record has the defect."""
        options = record.get("options") or {}
        return (
            record.get("command") == self.stage
            and recorded_result(record) in self.results
            and all(options.get(name) == value for name, value in self.options.items())
        )


def known_defects(text: str | None = None) -> list[Defect]:
    """The defects of a file's text; None: of the package's file."""
    if text is None:
        text = (files("sabia.core.shards.lineage") / FILE).read_text("utf-8")
    return [Defect(one["stage"], tuple(one["results"]), one["wrong"], one.get("options", {}))
            for one in tomllib.loads(text).get("defect", ())]  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """An output with a defect, how many of its shards have it, and what was made from it."""

    path: str
    defect: Defect
    shards: int
    made_from_it: Sequence[str]


def diagnose(graph: Graph, defects: Sequence[Defect]) -> list[Diagnosis]:
    """All outputs of a graph that a defect is in, in the graph's order."""
    diagnoses = []
    for path, node in graph.items():
        for defect in defects:
            if count := _affected(node.output, defect):
                after = descendants(graph, [path])
                diagnoses.append(Diagnosis(path, defect, count, after))
    return diagnoses


def _affected(output: Output, defect: Defect) -> int:
    """Shards of an output that have a defect; 1 for an output without shards."""
    if not output.shards:
        return int(any(map(defect.made, output.records())))
    return sum(
        any(map(defect.made, Output(shard.path, shard.record, [shard]).records()))
        for shard in output.shards
    )


def run(job: Job) -> None:
    """Print what is wrong below the job's inputs; raises Infeasible if anything is."""
    graph = read_graph(job.inputs or (".",))
    diagnoses = diagnose(graph, known_defects())
    affected = dict.fromkeys(one.path for one in diagnoses)
    after = [path for path in descendants(graph, list(affected)) if path not in affected]
    commands = commands_for(graph, {*affected, *after})
    if job.json:
        print(json.dumps({
            "outputs": len(graph),
            "defects": [{"path": one.path, "stage": one.defect.stage, "shards": one.shards,
                         "wrong": one.defect.wrong, "made_from_it": list(one.made_from_it)}
                        for one in diagnoses],
            "commands": commands,
        }))  # fmt: skip
    else:
        for one in diagnoses:
            shards = f" ({one.shards} shards)" if graph[one.path].output.shards else ""
            print(f"{one.path}{shards}: {one.defect.stage}: {one.defect.wrong}")
        if after:
            print("made from them:", *after, sep="\n  ")
        if commands:
            print("make them again:", *commands, sep="\n  ")
        if not diagnoses:
            print(f"{len(graph):,} outputs, none of which was made by code with a known defect")
    if diagnoses:
        raise Infeasible(f"{len(affected) + len(after):,} of {len(graph):,} outputs are affected")
