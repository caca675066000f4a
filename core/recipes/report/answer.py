"""Answers the question of `sabia report`, as text or as JSON.

From a token or a row to its documents, or from documents to their uses: outputs, removals, token
rows, and the steps that read them.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes
from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, UsageError
from sabia.core.options.reporting import ReportOptions
from sabia.core.recipes.report.given_outputs import (
    Output,
    open_outputs,
    provenance_of,
    rejected_with,
    rows_with,
)
from sabia.core.recipes.report.run_rows import TrainingRun
from sabia.core.recipes.report.token_chain import Chains, stages_of, tokenizers_beside
from sabia.core.recipes.report.token_row import ADDRESS_HINT, TokenRow, read_row
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source

MOST_ROWS = 20  # of equal id that --row shows


def run(job: Job, options: ReportOptions) -> None:
    """Print the answer; raises UsageError for a question that cannot be answered."""
    outputs, runs = open_outputs(job.inputs, options.text_column)
    chains = Chains(outputs, options.tokenizer)
    if options.token:
        answer = of_token(options.token, outputs, chains)
    elif options.row:
        answer = of_row(options.row, outputs, chains)
    else:
        trained = [TrainingRun(Path(path), outputs) for path in runs]
        uses, missing, remarks = uses_of(wanted_documents(str(options.document)), outputs, trained)
        for remark in remarks:
            notes.warn(remark)
        answer = {"documents": [{"id": name} | use for name, use in uses.items()]}
        answer["not_found"] = missing
    if options.json:
        print(json.dumps(answer, ensure_ascii=False, indent=2, default=str))
    else:
        print("\n".join(lines_of(answer)))


def of_token(text: str, outputs: Sequence[Output], chains: Chains) -> dict[str, object]:
    """The chain of the token RUN:STEP:ROW:POSITION."""
    path, *rest = text.rsplit(":", 3)
    if len(rest) != 3 or not all(part.isdigit() for part in rest):
        raise UsageError(f"--token: {text!r} (expected RUN:STEP:ROW:POSITION)")
    step, row, position = map(int, rest)
    trained = TrainingRun(Path(path), outputs)
    if trained.command == "grpo":
        return of_sample(trained, step, row, position, chains)
    if trained.command not in ("pretrain", "sft"):
        raise UsageError(
            f"--token: {path} is a run of {trained.command} (expected pretrain, sft or grpo)"
        )
    number = trained.row_of(step, row)
    source, here = trained.located(number)
    chains = replace(chains, variables=trained.identity.get("chat", {}))
    about: dict[str, Any] = {"run": path, "step": step, "row_of_step": row, "row_of_run": number}
    if number in trained.skipped:
        about["skipped"] = "a guard has skipped this row since"
    made = provenance_of(source)
    near = [str(trained.path / "final"), *tokenizers_beside(source.name, made)]
    if made.get("command") == "tokenize":
        near = near[1:] + near[:1]
    return about | _of_position(read_row(source, here), position, chains, made, near)


def _of_position(
    row: TokenRow, position: int, chains: Chains, made: dict[str, Any], near: Sequence[str]
) -> dict[str, object]:
    piece = row.piece_at(position)
    about = _about(row) | {"position": position, "token_id": int(row.ids[position])}
    if piece is None:
        return about | {"document": "none: padding"}
    return about | {"document": chains.of_piece(row, piece, position, made, near)}


def _about(row: TokenRow) -> dict[str, object]:
    return {"shard": row.shard, "row": row.number, "id": row.id, "source": row.source}


def of_row(text: str, outputs: Sequence[Output], chains: Chains) -> dict[str, Any]:
    """The documents of the rows with an id; the same tokens may be in several."""
    tokens = [output for output in outputs if output.kind == "tokens"]
    shard, _, row_id = text.rpartition(":")
    matches = [*_rows_with_id(tokens, shard, row_id)]
    if not matches:
        paths = (
            ", ".join(output.path for output in tokens) or "the given paths: none has token rows"
        )
        raise BadData(f"--row: no token row {text} in {paths}")
    rows = []
    for source, number in matches[:MOST_ROWS]:
        row, made = read_row(source, number), provenance_of(source)
        near = tokenizers_beside(source.name, made)
        pieces = [
            {"positions": [piece.start, piece.end]} | chains.of_piece(row, piece, None, made, near)
            for piece in row.pieces
        ]
        rows.append(_about(row) | {"documents": pieces})
    more = {"rows_left_out": len(matches) - MOST_ROWS} if len(matches) > MOST_ROWS else {}
    return {"rows": rows} | more


def _rows_with_id(
    outputs: Sequence[Output], shard: str, row_id: str
) -> Iterator[tuple[Source, int]]:
    for output in outputs:
        for source in output.sources:
            if not shard or source.name == shard:
                for numbers, _ in rows_with(source, {"id": pa.array([row_id])}, ("id",)):
                    yield from ((source, number) for number in numbers.tolist())


def of_sample(
    trained: TrainingRun, step: int, row: int, position: int, chains: Chains
) -> dict[str, object]:
    """The chain of a token of a GRPO run: the sample, and the record of its prompt."""
    paths = sorted((trained.path / "samples").glob(f"step-{step - 1:08d}-*.parquet"))
    samples: list[dict[str, Any]] = []
    for path in paths:
        with parquet_at(path) as file:
            samples += [{"shard": str(path)} | one for one in file.read().to_pylist()]
    if not row < len(samples):
        raise UsageError(f"--token: sample {row} of step {step} of {trained.path} (expected one of "
                         f"its {len(samples)} samples)")  # fmt: skip
    sample = samples[row]
    if not position < len(sample["tokens"]):
        raise UsageError(
            f"--token: position {position} of a sample of {len(sample['tokens'])} tokens"
        )
    about = {"run": str(trained.path), "step": step, "row_of_step": row, "shard": sample["shard"],
             "position": position, "token_id": sample["tokens"][position]}  # fmt: skip
    kept = ("prompt_id", "sample", "text", "reward", "finish_reason", "seed", "policy_version")
    return about | {
        "sampled": {name: sample[name] for name in kept},
        "stages": stages_of(chains.records(sample["prompt_id"], {})),
    }


def lines_of(value: Any, indent: str = "") -> Iterator[str]:
    """An answer as indented lines."""
    for name, one in value.items():
        label = f"{indent}{name}:"
        if isinstance(one, dict):
            yield label
            yield from lines_of(one, f"{indent}  ")
        elif isinstance(one, list) and one and isinstance(one[0], dict):
            for number, item in enumerate(one, 1):
                yield f"{label[:-1]} {number} of {len(one)}:"
                yield from lines_of(item, f"{indent}  ")
        elif one is not None:
            yield f"{label} {_value(one)}"


def _value(value: object) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(str, value[:20]))
        return f"{shown}, … ({len(value)})" if len(value) > 20 else shown or "none"
    return " ".join(str(value).split())


# of the rows of a document that are read; a removed row has some of the last ones
COLUMNS = ("id", "url", "source", "crawl_time", "warc_file", "warc_record", "language", "cluster",
           "cluster_size", "contamination", "rewrite_verdict", "reason", "kept_id",
           "similarity")  # fmt: skip
Uses = dict[str, dict[str, Any]]  # by the id of a document


def wanted_documents(given: str) -> list[str]:
    """The URLs and ids that --document names: itself, or the lines of the file."""
    path, is_file = Path(given), False
    with contextlib.suppress(OSError, ValueError):
        is_file = path.is_file()
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
    uses: Uses = defaultdict(lambda: {"outputs": [], "rows": [], "samples": []})
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
            for source in output.sources:
                _add_rows(uses, output.path, source, by_id, runs, remarks)
    for run in runs:
        if run.command == "sft":
            for source in run.sources:
                _add_rows(uses, str(run.path), source, by_id, [run], remarks)
        elif run.command == "grpo":
            _add_samples(uses, run, by_id)
    known = {record.get("url") for use in uses.values() for record in use["outputs"]} | uses.keys()
    return uses, [one for one in wanted if one not in known], remarks


def _add_records(uses: Uses, output: Output, asked: dict[str, pa.Array]) -> None:
    about = {"output": output.path, "kind": output.kind, "command": output.command}
    for source in output.sources:
        if output.kind == "rejects":
            for row in rejected_with(source, asked):
                columns = {name: row[name] for name in COLUMNS if row.get(name) is not None}
                uses[str(row.get("id"))]["outputs"].append(about | columns)
            continue
        for numbers, table in rows_with(source, asked, COLUMNS):
            for number, row in zip(numbers.tolist(), table.to_pylist(), strict=True):
                columns = {name: value for name, value in row.items() if value is not None}
                position = {"shard": source.name, "row": number}
                uses[str(row["id"])]["outputs"].append(about | position | columns)


def _add_rows(
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
            uses[names[hit]]["rows"].append(use)


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
        uses[name]["samples"].append(
            {"run": str(run.path), "steps": sorted(steps),
             "checkpoints": [step for step in run.checkpoints if step >= first]}
        )  # fmt: skip
