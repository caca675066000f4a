"""What a release's outputs hold, as the readers of the package give it, in JSON."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {
    "crawled": "document", "pages": "document", "scored": "document", "unique": "document",
    "rewritten": "document", "short.parquet": "document", "copies": "document",
    "tokens": "tokens", "arrow": "tokens", "chats.jsonl": "chat", "prompts.jsonl": "prompt",
    "rollouts/samples": "sample", "scores.parquet": "score",
}  # fmt: skip
MODELS = ("base/final", "adapted/final", "adapted/adapter", "rollouts/final", "small")
Call = dict[str, Any]


def digest(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def read_rows(path: str) -> dict[str, Any]:
    """The number of rows of an output, and a digest of each column: of those of its kind (known),
    and of those that a stage has added."""
    from sabia.core.shards import schemas
    from sabia.core.shards.inputs import from_path

    kind, rows = KINDS[path], list[dict[str, Any]]()
    for source in from_path(path, kind):
        for batch in source.batches():
            rows += schemas.conform(batch, kind).to_pylist()
    columns = {name: digest(json.dumps([row[name] for row in rows], default=str).encode())
               for name in rows[0]}  # fmt: skip
    known = [name for name in columns if name in schemas.KINDS[kind].names]
    return {"rows": len(rows), "known": known, "columns": columns}


def read_model(path: str) -> dict[str, str]:
    """A digest of each tensor of a model, as float32, or of an adapter."""
    from safetensors.numpy import load_file

    from sabia.core.model.storage.hub import load_model

    if path.endswith("/adapter"):
        tensors = load_file(f"{path}/adapter_model.safetensors")
    else:
        _, tensors = load_model(path)
    return {name: digest(np.ascontiguousarray(one, np.float32).tobytes())
            for name, one in sorted(tensors.items())}  # fmt: skip


def figures(run: Path) -> dict[str, dict[str, float]]:
    """Loss and reward by step, from the metrics of a run."""
    return {str(row["step"]): {name: row[name] for name in ("loss", "reward") if name in row}
            for row in _metrics(run) if row.keys() & {"loss", "reward"}}  # fmt: skip


def _metrics(run: Path) -> Iterator[dict[str, Any]]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)


def read_all(calls: Sequence[Call]) -> dict[str, Any]:
    """What is expected of a release in the current directory; `resumed` has the runs that were
    interrupted, as complete runs beside the directory give them."""
    stopped = [call["out"] for call in calls if call["stops"]]
    return {
        "rows": {path: read_rows(path) for path in KINDS},
        "models": {path: read_model(path) for path in MODELS},
        "resumed": {out: figures(Path("..", out)) for out in stopped},
    }
