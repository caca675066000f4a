"""What the records of a run and of all that it was made from tell, for its model card.

Only records and checkpoints' manifests are read here, and of removed rows the column `reason`; the
documents themselves are read by `card_content`.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from sabia.core.errors import UsageError
from sabia.core.plan.chips import chip_of_device
from sabia.core.plan.compute import train_flops
from sabia.core.recipes.report.given_outputs import open_outputs
from sabia.core.recipes.report.run_rows import TrainingRun
from sabia.core.shards.lineage.graph import Graph, Node, read_graph
from sabia.core.shards.lineage.graph_report import row_counts
from sabia.core.shards.lineage.outputs_found import Output, Record, upstream
from sabia.core.spec import from_config
from sabia.core.spec.model import active_parameter_count, parameter_count

TRAINERS = ("pretrain", "sft", "grpo")
GENERATION_FLOPS = 2  # for each active parameter and sampled token: forward alone


@dataclass(frozen=True)
class Trained:
    """A training run. tokens: of its steps; sampled: tokens that it has generated; seconds: of all
    its starts together; device: name and number of its last start, '' and 0 if not recorded."""

    path: str
    command: str
    finished: bool
    steps: int
    tokens: int
    sampled: int
    parameters: int
    active: int
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    seconds: float
    device: str
    devices: int
    started: str
    ended: str

    @property
    def flops(self) -> float:
        """FLOPs of the training (6 for each active parameter and token; 4 with LoRA)."""
        return train_flops(self.active, self.tokens, bool(self.options.get("lora_rank")))

    @property
    def generation_flops(self) -> float:
        """FLOPs of sampling."""
        return GENERATION_FLOPS * self.active * self.sampled

    @property
    def energy_kwh(self) -> float | None:
        """The power of the data sheet times hours and chips; None where no chip is known."""
        chip = chip_of_device(self.device)
        if chip is None or chip.power_w is None:
            return None
        return chip.power_w / 1e3 * self.seconds / 3600 * self.devices / chip.devices


@dataclass(frozen=True)
class StageFacts:
    """A stage that has handled documents. output: '' where its rows went through a pipe;
    reasons: removed rows by reason, None if those rows are not there."""

    command: str
    output: str
    record: Record
    rows: Mapping[str, int]
    reasons: Mapping[str, int] | None

    @property
    def options(self) -> Mapping[str, Any]:
        """The resolved options."""
        return self.record.get("options") or {}

    @property
    def of_network(self) -> bool:
        """Whether it is a crawl of the network, which must name a contact."""
        return _is_crawl(self.record)

    @property
    def line(self) -> str:
        """The command and its arguments."""
        return " ".join(["sabia", self.command, *map(str, self.record.get("arguments", ()))])

    @property
    def contact(self) -> str:
        """The contact that a crawl has named; '' if none."""
        return _contact(self.record)


def _contact(record: Record) -> str:
    """The value of --contact in the arguments of a call; '' if it is not given."""
    words = list(map(str, record.get("arguments", ())))
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--contact" or word.startswith("--contact="):
            return after if word == "--contact" else word.partition("=")[2]
    return ""


def _is_crawl(record: Record) -> bool:
    return record.get("command") == "crawl" and bool(_contact(record))


@dataclass(frozen=True)
class Given:
    """A file or directory that no output is, and the commands that have read its rows; seeds: it
    has the URLs with which a crawl began."""

    path: str
    read_by: Sequence[str]
    seeds: bool


@dataclass(frozen=True)
class Facts:
    """A run and all that it was made from. runs: the last one is the run itself; documents, tokens:
    the outputs that it was trained on; piped: whether stages between these documents and the tokens
    kept no output; models: directories that it began with and that are no run here."""

    runs: Sequence[Trained]
    stages: Sequence[StageFacts]
    given: Sequence[Given]
    documents: Sequence[str]
    tokens: Sequence[str]
    piped: bool
    models: Sequence[str]
    missing: Sequence[str]

    @property
    def run(self) -> Trained:
        """The run that was asked for."""
        return self.runs[-1]


def facts_of(run: str, folders: Sequence[str]) -> Facts:
    """The facts of a run directory, of which the outputs below the folders are known. Raises
    UsageError if it is none, or has no checkpoint."""
    if not os.path.isfile(os.path.join(run, "run.json")):
        raise UsageError(f"--card: {run} is no run directory (expected one with run.json)")
    graph, path = read_graph([*folders, run]), os.path.abspath(run)
    if path not in graph or graph[path].output.command not in TRAINERS:
        raise UsageError(f"--card: {run} is no run of {', '.join(TRAINERS)}")
    runs = list(dict.fromkeys(_runs(path, graph)))
    behind = list(_behind(runs, graph))
    tokens = [p for p in behind if graph[p].output.command == "tokenize"]
    read = {source for p in [*runs, *tokens] for source in graph[p].rows_from} - {*tokens}
    documents = [p for p in [*behind, *sorted(read.difference(graph))] if p in read]
    trained = [_trained(p, graph[p]) for p in runs]
    first = [one for one in trained if not any(_began_with(one.path, graph))]
    return Facts(
        runs=trained,
        stages=[stage for p in behind for stage in _stages(p, graph)],
        given=_given([*behind, *runs], graph),
        documents=[p for p in documents if os.path.exists(p)],
        tokens=[p for p in tokens if os.path.exists(p)],
        piped=any(_piped(graph[p].output) for p in [*runs, *tokens]),
        models=[str(one.options["model"]) for one in first if one.options.get("model")],
        missing=[p for p in [*documents, *tokens] if not os.path.exists(p)],
    )


def _runs(path: str, graph: Graph) -> Iterator[str]:
    """The runs whose models a run began with, from the first on, and the run."""
    for source in _began_with(path, graph):
        yield from _runs(source, graph)
    yield path


def _began_with(path: str, graph: Graph) -> Iterator[str]:
    """The runs that have made a model which a run began with."""
    for source in sorted(graph[path].sources - graph[path].rows_from):
        if graph[source].output.command in TRAINERS and source != path:
            yield source


def _behind(runs: Sequence[str], graph: Graph) -> Iterator[str]:
    """The outputs whose rows the runs were made from, in the order of the graph."""
    reached, left = set[str](), list(runs)
    while left:
        sources = {one for one in graph[left.pop()].rows_from if one in graph} - reached
        reached |= sources
        left += sources
    return (path for path in graph if path in reached)


def _trained(path: str, node: Node) -> Trained:
    """The figures of a run."""
    run = TrainingRun(Path(path), ())
    manifest, record = run.manifest, run.record
    spec, device = from_config(manifest["config"]), manifest.get("device") or {}
    finished = bool(record.get("finished"))
    last = record if finished else manifest
    call = node.output.record
    return Trained(
        path=path,
        command=run.command,
        finished=finished,
        steps=int(last["step"]),
        tokens=int(last["tokens"] if finished else manifest["data"].get("tokens", 0)),
        sampled=sum(row.get("sampled_tokens", 0) for row in _metrics(run.path)),
        parameters=parameter_count(spec),
        active=active_parameter_count(spec),
        config=manifest["config"],
        options={**manifest["identity"], **(call.get("options") or {}),
                 "backend": manifest["backend"], "precision": manifest["precision"]},
        seconds=float(last["seconds"]),
        device=str(device.get("name", "")),
        devices=int(device.get("count", 0)),
        started=str(call.get("start", "")),
        ended=str(call.get("end", "")) if finished else "",
    )  # fmt: skip


def _metrics(run: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that a kill has cut short is left out."""
    path = run / "metrics.jsonl"
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        if line.endswith("}"):
            yield json.loads(line)


def _stages(path: str, graph: Graph) -> Iterator[StageFacts]:
    """The stage that made an output, after those that were piped into it."""
    output = graph[path].output
    own = output.shards[-1].record if output.shards else output.record
    for piped in _piped(output):
        counts = piped.get("rows") or {}
        yield StageFacts(str(piped.get("command")), "", piped, counts, _reasons(piped, graph))
    record = {**own, **output.record}
    counts = output.totals or row_counts(graph[path])
    yield StageFacts(output.command, path, record, counts, _reasons(record, graph))


def _piped(output: Output) -> list[Record]:
    """The calls whose rows went through pipes into an output, the first one first."""
    inputs = [one for shard in output.shards for one in shard.inputs]
    calls = upstream({"inputs": inputs or output.record.get("inputs", ())})
    known = {json.dumps([one.get("command"), one.get("inputs")], default=str): one for one in calls}
    return list(known.values())[::-1]


def _reasons(record: Record, graph: Graph) -> dict[str, int] | None:
    """How many rows a call has removed for which reason, the most frequent first."""
    counted: Counter[str] | None = None
    for path in record.get("writes", ()):
        if path not in graph or not os.path.exists(path):
            continue
        for output in open_outputs([path])[0]:
            if output.kind == "removed":
                counted = counted or Counter()
                for source in output.sources:
                    for batch in source.raw(["reason"]):
                        for one in pc.value_counts(batch.column("reason")).to_pylist():
                            counted[str(one["values"])] += one["counts"]
    return None if counted is None else dict(counted.most_common())


def _given(paths: Sequence[str], graph: Graph) -> list[Given]:
    read_by: dict[str, list[Record]] = {}
    for path in paths:
        for leaf in sorted(graph[path].rows_from & graph[path].leaves):
            read_by.setdefault(leaf, []).append(graph[path].output.record)
    return [
        Given(path, tuple(dict.fromkeys(str(one["command"]) for one in records)),
              all(map(_is_crawl, records)))
        for path, records in read_by.items()
    ]  # fmt: skip
