"""From documents to their uses: outputs, removals, token rows, and the steps that read them."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.digests import parquet_at
from sabia.core.errors import UsageError
from sabia.core.recipes.report.given_outputs import Output, rejected_with, rows_with
from sabia.core.recipes.report.run_rows import TrainingRun
from sabia.core.recipes.report.token_row import ADDRESS_HINT
from sabia.core.shards.sources import Source

# of the rows of a document that are read; a removed row has some of the last ones
COLUMNS = ("id", "url", "source", "crawl_time", "warc_file", "warc_record", "language", "cluster",
           "cluster_size", "contamination", "rewrite_verdict", "reason", "kept_id",
           "similarity")  # fmt: skip
Uses = dict[str, dict[str, Any]]  # by the id of a document


def wanted_documents(given: str) -> list[str]:
    """The URLs and ids that --document names: itself, or the lines of the file."""
    path = Path(given)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        return [given]
    lines = [line.strip() for line in path.read_text("utf-8", "replace").splitlines()]
    wanted = list(dict.fromkeys(filter(None, lines)))
    if not wanted:
        raise UsageError(f"--document: {given}: no lines (expected a URL or an id in each)")
    return wanted


def uses_of(
    wanted: Sequence[str], outputs: Sequence[Output], runs: Sequence[TrainingRun]
) -> tuple[Uses, list[str], list[str]]:
    """(the uses of each document, the URLs and ids that no output has, remarks)."""
    uses: Uses = {}
    remarks = list[str]()
    urls = pa.array([one for one in wanted if "://" in one], pa.string())
    ids = pa.array([one for one in wanted if "://" not in one], pa.string())
    asked = {name: some for name, some in (("url", urls), ("id", ids)) if len(some)}
    for output in outputs:
        if output.kind != "tokens":
            _add_records(uses, output, asked)
    by_id = pa.array(list(dict.fromkeys([*uses, *ids.to_pylist()])), pa.string())
    for output in outputs:
        if output.kind == "tokens":
            _add_rows(uses, output, by_id, runs, remarks)
    for run in runs:
        if run.command == "sft":
            for source in run.sources:
                _add_rows_of(uses, str(run.path), source, by_id, [run], remarks)
        elif run.command == "grpo":
            _add_samples(uses, run, by_id)
    known = {record.get("url") for use in uses.values() for record in use["outputs"]} | uses.keys()
    return uses, [one for one in wanted if one not in known], remarks


def _use(uses: Uses, name: str) -> dict[str, list[dict[str, Any]]]:
    return uses.setdefault(name, {"outputs": [], "rows": [], "samples": []})


def _add_records(uses: Uses, output: Output, asked: dict[str, pa.Array]) -> None:
    about = {"output": output.path, "kind": output.kind, "command": output.command}
    for source in output.sources:
        if output.kind == "rejects":
            for row in rejected_with(source, asked):
                columns = {name: row[name] for name in COLUMNS if row.get(name) is not None}
                _use(uses, str(row.get("id")))["outputs"].append(about | columns)
            continue
        for numbers, table in rows_with(source, asked, COLUMNS):
            for number, row in zip(numbers.tolist(), table.to_pylist(), strict=True):
                columns = {name: value for name, value in row.items() if value is not None}
                position = {"shard": source.name, "row": number}
                _use(uses, str(row["id"]))["outputs"].append(about | position | columns)


def _add_rows(
    uses: Uses, output: Output, ids: pa.Array, runs: Sequence[TrainingRun], remarks: list[str]
) -> None:
    for source in output.sources:
        _add_rows_of(uses, output.path, source, ids, runs, remarks)


def _add_rows_of(
    uses: Uses, output: str, source: Source, ids: pa.Array, runs: Sequence[TrainingRun],
    remarks: list[str],
) -> None:  # fmt: skip
    """The rows of a token shard that have tokens of the documents, and the steps that read them."""
    if source.form != "jsonl" and "document_ids" not in source.stored_schema().names:
        remarks.append(f"{source.name}: its rows have no addresses; {ADDRESS_HINT}")
        return
    columns = ("id", "document_ids", "document_lengths", "document_offsets")
    for numbers, table in rows_with(source, {"document_ids": ids}, columns):
        read = _reads(runs, source, numbers)
        row_ids = table.column("id").to_pylist() if "id" in table.schema.names else numbers.tolist()
        parts = [table.column(name).combine_chunks() for name in columns[1:]]
        of_row = pc.list_parent_indices(parts[0]).to_pylist()
        names, lengths, offsets = (pc.list_flatten(part).to_pylist() for part in parts)
        hits = np.flatnonzero(
            pc.is_in(pc.list_flatten(parts[0]), ids).to_numpy(zero_copy_only=False)
        )
        for hit in hits.tolist():
            row = of_row[hit]
            span = [offsets[hit], offsets[hit] + lengths[hit]]
            use = {"output": output, "shard": source.name, "row": int(numbers[row]),
                   "id": row_ids[row], "tokens": span, "read": read.get(row, [])}  # fmt: skip
            _use(uses, names[hit])["rows"].append(use)


def _reads(
    runs: Sequence[TrainingRun], source: Source, numbers: np.ndarray
) -> dict[int, list[dict[str, Any]]]:
    """For each row of a shard, by its position in `numbers`: the runs and steps that read it."""
    reads = defaultdict[int, list[dict[str, Any]]](list)
    for run in runs:
        if run.command not in ("pretrain", "sft"):
            continue
        steps_of = defaultdict[int, list[int]](list)
        for row, step in zip(
            *(part.tolist() for part in run.steps_of(source, numbers)), strict=True
        ):
            steps_of[row].append(step)
        for row, steps in steps_of.items():
            checkpoints = [step for step in run.checkpoints if step >= steps[0]]
            read = {"run": str(run.path), "steps": steps, "checkpoints": checkpoints}
            reads[row].append(
                read | ({"skipped": True} if run.is_skipped(source, numbers[row]) else {})
            )
    return reads


def _add_samples(uses: Uses, run: TrainingRun, ids: pa.Array) -> None:
    """The steps of a GRPO run that sampled answers to a prompt."""
    steps_of = defaultdict[str, set[int]](set)
    for path in sorted((run.path / "samples").glob("step-*.parquet")):
        with parquet_at(path) as file:
            table = file.read(["prompt_id", "policy_version"])
        for row in table.filter(pc.is_in(table.column("prompt_id"), ids)).to_pylist():
            steps_of[row["prompt_id"]].add(row["policy_version"] + 1)
    for name, steps in steps_of.items():
        first = min(steps)
        _use(uses, name)["samples"].append(
            {"run": str(run.path), "steps": sorted(steps),
             "checkpoints": [step for step in run.checkpoints if step >= first]}
        )  # fmt: skip
