"""The rows that a trainer writes besides its run directory: its metrics, and what it rejects.

The metrics of a finished run go to stdout, the same whether or not it was interrupted. On a
terminal, in a job's log (stdout and stderr are the same file) and under srun, which joins the
streams of all tasks, they are a short table of rows spread over the run, because binary data is not
readable there. Anything else gets one stream in the format of `--to`.
Rows that cannot be used are stored with a reason by process 0, counted by all processes.
"""

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.parallel.world import World
from sabia.core.shards import arrow_arrays
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt_rejects
from sabia.core.shards.lineage.run_record import run_metadata
from sabia.core.shards.outputs import open_stdout
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.token_rows.row_store import RejectRow
from sabia.core.train.telemetry import metrics_path, read_rows

BY_SOURCE = ("loss_by_source", "validation_by_source")
RUN_COLUMNS = ("mfu", "mfu_6nd", "gemm_share", "goodput", "memory_bytes", "device_memory_bytes")
COLUMNS = ("step", "loss", "objective", "lr", "grad_norm", "tokens", "tokens_per_s", *RUN_COLUMNS,
           "expert_load", "experts_idle", "seconds", "validation_loss",
           "validation_tokens")  # fmt: skip
# of runs with a teacher, and of runs on preferences
TEACHER_COLUMNS = ("kl", "validation_kl")
FIGURES = ("accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen",
           "logp_rejected")  # fmt: skip
PREFERENCE_COLUMNS = (*FIGURES, *(f"validation_{name}" for name in FIGURES), "validation_pairs")
GRPO_COLUMNS = ("step", "samples", "no_reward", "unknown_verdicts", "sampled_tokens",
                "trained_tokens", "updates", "reward", "live_groups", "pass_at_k", "length",
                "truncated", "entropy",
                "clip_fraction", "logprob_gap", "logprob_gap_max", "kl", "loss", "grad_norm", "lr",
                "tokens_per_s", "seconds", "tokens", *RUN_COLUMNS, "validation_reward",
                "validation_prompts")  # fmt: skip
GRPO_TEACHER = ("teacher_kl",)  # of runs with a teacher
# of runs with a judge or a draft, those that a run has
JUDGE_COLUMNS = ("judge_calls", "judge_cached", "judge_usd", "audit_verdicts", "audit_agreement",
                 "audit_kappa", "reward_length", "reward_format", "format",
                 "break_outs", "judge_family", "accepted_proposals")  # fmt: skip
COUNTS = {"judge_calls", "audit_verdicts", "break_outs", "judge_family", "tokens",
          "memory_bytes", "device_memory_bytes", "experts_idle",
          "validation_tokens", "validation_prompts", "validation_pairs",
          *GRPO_COLUMNS[:7]}  # fmt: skip
BATCH_ROWS = 10_000
TABLE_ROWS = 12
SHOWN = {
    "step": "{:,}", "reward": "{:.4f}", "loss": "{:.4f}", "validation_loss": "{:.4f}",
    "validation_reward": "{:.4f}", "accuracy": "{:.1%}", "margin": "{:.3g}",
    "validation_accuracy": "{:.1%}",
    "live_groups": "{:.2f}", "length": "{:.1f}", "lr": "{:.3g}", "grad_norm": "{:.3g}",
    "tokens": "{:,}", "tokens_per_s": "{:,.0f}", "mfu": "{:.1%}", "gemm_share": "{:.1%}",
}  # fmt: skip


def write_metric_rows(job: Job, run: Path, launcher: str = "bare") -> None:
    """Write the rows of a run's metrics file to stdout."""
    read = list(read_rows(metrics_path(run)))
    judged = [name for name in JUDGE_COLUMNS if any(name in row for row in read)]
    grpo = job.command == "grpo"
    schema = with_sources(read)
    if grpo:
        learned = [name for name in GRPO_TEACHER if any(name in row for row in read)]
        schema = columns_schema((*GRPO_COLUMNS, *learned, *judged))
        if names := _sources(read, ("reward_by_source",)):
            schema = schema.append(pa.field("reward_by_source", arrow_arrays.type_of(names)))
    rows = [{name: row.get(name) for name in schema.names} for row in read]
    out = sys.stdout.buffer
    if job.to != "jsonl" and (out.isatty() or launcher == "srun" or _is_log()):
        from rich.console import Console
        from rich.table import Table

        named = [name for name in SHOWN if any(row.get(name) is not None for row in rows)]
        caption = f"{len(rows):,} rows in {metrics_path(run)}"
        table = Table(*(name.replace("_", " ") for name in named), caption=caption)
        for row in _spread(rows, TABLE_ROWS):
            table.add_row(*("" if row[n] is None else SHOWN[n].format(row[n]) for n in named))
        Console().print(table)
        return
    made = {"command": job.command, "run": str(run)}
    with open_stdout(job, schema, made | run_metadata(job, made)) as writer:
        for start in range(0, len(rows), BATCH_ROWS):
            writer.write(pa.RecordBatch.from_pylist(rows[start : start + BATCH_ROWS], schema))


def columns_schema(names: Iterable[str]) -> pa.Schema:
    """The schema of these columns: counts are int64, all others float64."""
    return pa.schema([(n, pa.int64() if n in COUNTS else pa.float64()) for n in names])


def with_sources(rows: Sequence[dict[str, Any]]) -> pa.Schema:
    """COLUMNS, those of a teacher and of preferences where `rows` have them, and the losses by
    source, structs of the sources' names (null where there are none).

    Each of `rows` may have an object of numbers by source in the columns BY_SOURCE.
    """
    names = _sources(rows, BY_SOURCE)
    of_some = (*TEACHER_COLUMNS, *PREFERENCE_COLUMNS)
    learned = [name for name in of_some if any(name in row for row in rows)]
    return pa.schema(
        [
            *columns_schema((*COLUMNS, *learned)),
            *((by, arrow_arrays.type_of(names)) for by in BY_SOURCE),
        ]
    )


def _sources(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """The names of the sources in these columns."""
    return sorted({name for row in rows for by in columns for name in row.get(by) or ()})


def _spread(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most `count` rows, evenly spread, including the first and the last."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _is_log() -> bool:
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


@dataclass
class RejectCount:
    """Counts rejects and their reasons, and writes them in the leading process."""

    rejects: Rejects | None
    reasons: Counter[str] = field(default_factory=Counter)  # with N for each number
    examples: dict[str, str] = field(default_factory=dict)  # the first of each kind

    @property
    def count(self) -> int:
        """How many there are."""
        return self.reasons.total()

    def add(self, row: dict[str, Any], reason: str, shard: str) -> None:
        """Count one more."""
        kind = re.sub(r"\d+", "N", reason)
        self.reasons[kind] += 1
        self.examples.setdefault(kind, reason)
        if self.rejects is not None:
            self.rejects.add(row, reason, shard)

    def describe(self) -> str:
        """How many there are, and the most frequent reason with its number."""
        if not self.reasons:
            return "none rejected"
        kind, times = self.reasons.most_common(1)[0]
        return f"{self.count:,} rejected; {times:,} of them: {self.examples[kind]}"


@contextlib.contextmanager
def opened_rejects(job: Job, world: World, what: str) -> Iterator[RejectCount]:
    """Yield what accepts rejects; prints at the end how many `what` were rejected, and the file."""
    path = reject_path(job)
    writes = world.leads and not job.dry_run
    if writes:
        adopt_rejects(job)
    with Rejects(path) if writes else contextlib.nullcontext() as rejects:
        counted = RejectCount(rejects)
        yield counted
        if counted.count:
            notes.note(f"{counted.count:,} {what} rejected{f' → {path}' if writes else ''}")


def warn_of_rejects(what: str) -> RejectRow:
    """A function that names each rejected row on stderr, for small held-out sets."""

    def warn(_row: dict[str, Any], reason: str, shard: str) -> None:
        notes.warn(f"{shard}: {what} left out: {reason}")

    return warn
