"""The report of a quantized model: its rows, and a line for each component."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from sabia.core.shards.job import Job
from sabia.core.shards.lineage import run_record
from sabia.core.shards.outputs import open_stdout

SCHEMA = pa.schema(
    [("layer", pa.int64()), ("component", pa.string()), ("module", pa.string()),
     ("scheme", pa.string()), ("bits", pa.int64()), ("method", pa.string()),
     ("mse", pa.float64()), ("relative_error", pa.float64()), ("output_error", pa.float64()),
     ("output_error_rtn", pa.float64()), ("kl_nats", pa.float64()), ("kl_99_nats", pa.float64()),
     ("kl_max_nats", pa.float64()), ("same_top_share", pa.float64()),
     ("perplexity_before", pa.float64()), ("perplexity_after", pa.float64()),
     ("score_before", pa.float64()), ("score_after", pa.float64()), ("score_noise", pa.float64()),
     ("tokens", pa.int64()), ("size_bytes", pa.int64())]
)  # fmt: skip


def how_rounded(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each component: number format, method, and which matrices had too few tokens."""
    for component in dict.fromkeys(row["component"] for row in rows):
        own = [row for row in rows if row["component"] == component]
        methods = Counter((row["scheme"], row["method"]) for row in own)
        parts = [
            f"{count:,} {scheme} {_METHODS[method]}" for (scheme, method), count in methods.items()
        ]
        line = f"{component}: {', '.join(parts)}"
        calibrated = {row["scheme"] for row in own if row["method"] != "rtn"}
        nearest = [r for r in own if r["method"] == "rtn" and r["scheme"] in calibrated]
        if nearest:
            names = [f"{row['module']} ({row['tokens']})" for row in nearest[:3]]
            more = f" and {len(nearest) - 3} more" if len(nearest) > 3 else ""
            line += f"; few tokens reached {', '.join(names)}{more}"
        yield line


_METHODS = {"gptq": "by GPTQ", "learned": "by learned rounding", "rtn": "to nearest"}


def write_report(job: Job, report: dict[str, Any]) -> None:
    """Write the report as JSON, or its rows, those of the held-out tokens by source and by length,
    those of tasks, the worst first, and a last one for the whole model."""
    if job.json:
        print(json.dumps(report, indent=1))
        return
    measured = report.get("divergence") or {}
    parts = [
        {"component": kind, "module": name} | group
        for kind in ("source", "length")
        for name, group in measured.get(f"by_{kind}", {}).items()
    ]
    whole = measured | {
        "component": "model",
        "scheme": report["recipe"]["name"],
        "tokens": measured.get("tokens"),
        "size_bytes": report["size_after_bytes"],
    }
    for name in ("before", "after") if measured else ():
        whole[f"perplexity_{name}"] = math.exp(measured[f"loss_{name}_nats"])
    kept = [
        {"component": one["kind"], "module": one["name"], "score_before": one["before"],
         "score_after": one["after"],
         "score_noise": None if one["noise"] is None else one["noise"] * one["before"]}
        for one in report.get("evaluation", {}).get("recovery", ())
    ]  # fmt: skip
    everything = [*report["layers"], *parts, *kept, whole]
    rows = [{name: row.get(name) for name in SCHEMA.names} for row in everything]
    made = {"command": job.command}
    with open_stdout(job, SCHEMA, made | run_record.run_metadata(job, made)) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, SCHEMA))
