"""The samples of a GRPO run as files, so that finished samples survive an interruption.

`samples/step-NNNNNNNN-RRRR.parquet` contains the graded samples of a step, of process RRRR,
and is written atomically; `…-RRRR-DD.parquet` those of the prompts of the step's draw DD. With a
rubric, `verdicts/` has a file of the same name, written before it, with the rows of the verdicts
(`bench.verdict_rows`); their first step is 1, as in the metrics.
While a step is sampled, finished samples are appended to a `.partial.jsonl` next to it, whose name
begins with a dot so that readers of the folder ignore it. A run that starts again reads them back
and generates only the rest, so a preemption loses no finished sample (and does not bias a step
towards short ones). Verdicts of a judge are in the client's cache.
"""

import base64
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from sabia.core import notes
from sabia.core.bench import score_rows
from sabia.core.bench.verdict_rows import VerdictRow, entries_of, to_batch
from sabia.core.digests import parquet_at
from sabia.core.errors import BadData
from sabia.core.generate.requests import Completion
from sabia.core.judge.verdict import Grade, Opinion, Verdict
from sabia.core.shards import schemas
from sabia.core.shards.atomic import sealed, unsealed
from sabia.core.shards.outputs import open_file

SYNC_EVERY_S = 2.0
EXTRA = (
    pa.field("request_id", pa.string()),
    pa.field("sample", pa.int32()),
    pa.field("text", pa.string()),
    pa.field("raw_logprobs", pa.list_(pa.float32())),
    pa.field("forced", pa.list_(pa.int32())),  # places of tokens that were not sampled
    pa.field("weights", pa.list_(pa.float64())),
    pa.field("message", pa.string()),  # the sample as a message of a chat record, JSON
    pa.field("opinions", pa.string()),  # of several judges or an auditor, JSON
    pa.field("steps", pa.string()),  # last token and reward of each step, JSON
    pa.field("routed_experts", pa.binary()),  # see core.model.routing
)
EXPERTS = "routed_experts"
TASK = "rubric"  # of the rows of verdicts
Key = tuple[str, int]  # (request id, sample)


class Journal:
    """The samples directory of a run, written by one process and read by all.

    verdicts: the directory of rows of verdicts, None for none.
    """

    def __init__(self, directory: Path, rank: int = 0, verdicts: Path | None = None) -> None:
        self.directory, self.rank, self.verdicts = directory, rank, verdicts
        directory.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None
        self._synced = 0.0

    def clear(self) -> None:
        """Remove all samples (of a run that starts again from step 0)."""
        for directory in filter(None, (self.directory, self.verdicts)):
            shutil.rmtree(directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)

    def path(self, step: int, draw: int = 0) -> Path:
        """The file of this process's samples of a step, or of a later draw of prompts in it."""
        more = f"-{draw:02d}" if draw else ""
        return self.directory / f"step-{step:08d}-{self.rank:04d}{more}.parquet"

    def _partial(self, step: int) -> Path:
        return self.directory / f".{self.path(step).stem}.partial.jsonl"

    def graded(self, step: int) -> dict[Key, tuple[Completion, Grade]]:
        """The finished samples of a step with their grades, of all processes."""
        graded: dict[Key, tuple[Completion, Grade]] = {}
        for path in sorted(self.directory.glob(f"step-{step:08d}-*.parquet")):
            try:
                with parquet_at(path) as file:
                    rows = file.read().to_pylist()
            except BadData as error:
                notes.warn(f"{error}; its samples are made again")
                continue
            for row in rows:
                items = zip(row["items"], row["weights"], strict=True)
                verdicts = [(item["id"], Verdict(item["verdict"]), w) for item, w in items]
                known = {f.name for f in fields(Completion) if row.get(f.name) is not None}
                completion = Completion(**{name: row[name] for name in known})
                opinions = _opinions(row.get("opinions"))
                steps = tuple((end, reward) for end, reward in json.loads(row.get("steps") or "[]"))
                grade = Grade(row["reward"], tuple(verdicts), opinions, steps)
                graded[completion.request_id, completion.sample] = completion, grade
        return graded

    def sampled(self, step: int) -> dict[Key, Completion]:
        """Ungraded samples of an interrupted step; an incomplete last line is ignored."""
        sampled: dict[Key, Completion] = {}
        names = (f"{mark}step-{step:08d}-*.partial.jsonl" for mark in ("", "."))
        for path in (path for name in names for path in sorted(self.directory.glob(name))):
            for line in path.read_text("utf-8").splitlines():
                try:
                    values = unsealed(json.loads(line))
                    if EXPERTS in values:
                        values[EXPERTS] = base64.b64decode(values[EXPERTS])
                    completion = Completion(**values)
                except (ValueError, TypeError):
                    continue
                sampled[completion.request_id, completion.sample] = completion
        return sampled

    def add(self, step: int, completion: Completion) -> None:
        """Append a finished sample; it is on the disk within SYNC_EVERY_S or at `close`."""
        if self._file is None:
            self._file = open(self._partial(step), "a", encoding="utf-8")  # noqa: SIM115
            self._synced = time.monotonic()
        values = asdict(completion)
        if experts := values.pop(EXPERTS):
            values[EXPERTS] = base64.b64encode(experts).decode()
        self._file.write(json.dumps(sealed(values)) + "\n")
        if time.monotonic() - self._synced > SYNC_EVERY_S:
            self._sync()

    def _sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Make the appended samples durable."""
        self._sync()
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(
        self,
        step: int,
        seed: int,
        prompt_ids: Sequence[str],
        samples: Iterable[tuple[Completion, Grade]],
        messages: Sequence[Mapping[str, Any]],
        draw: int = 0,
    ) -> pa.RecordBatch:
        """Write the graded samples of a draw of a step and drop its partial file; returns their
        rows."""
        samples = list(samples)
        if self.verdicts is not None:
            self._write_verdicts(self.verdicts, step, prompt_ids, samples, draw)
        rows = [
            _row(step, seed, prompt_id, *sample)
            | {"message": json.dumps(message, ensure_ascii=False)}
            for prompt_id, sample, message in zip(prompt_ids, samples, messages, strict=True)
        ]
        schema = pa.schema([*schemas.KINDS["sample"], *EXTRA])
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        made_by = {"command": "grpo", "kind": "sample", "policy_version": step, "seed": seed}
        with open_file(str(self.path(step, draw)), schema, made_by) as file:
            file.write(batch)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._partial(step).unlink(missing_ok=True)
        former = self.path(step).with_suffix(".partial.jsonl")  # its name in earlier versions
        former.unlink(missing_ok=True)
        return batch

    def _write_verdicts(
        self, directory: Path, step: int, prompt_ids: Sequence[str],
        samples: Iterable[tuple[Completion, Grade]], draw: int,
    ) -> None:  # fmt: skip
        """Write the rows of the verdicts of a step."""
        name = directory.parent.name
        rows = [
            VerdictRow(name, TASK, prompt_id, completion.sample, entry, step + 1)
            for prompt_id, (completion, grade) in zip(prompt_ids, samples, strict=True)
            for entry in entries_of(grade)
        ]
        directory.mkdir(parents=True, exist_ok=True)
        made_by = {"command": "grpo", "kind": "score", "policy_version": step}
        with open_file(
            str(directory / self.path(step, draw).name), score_rows.schema(), made_by
        ) as file:
            file.write(to_batch(rows, score_rows.schema()))


def _opinions(text: str | None) -> tuple[Opinion, ...]:
    """The opinions of a row."""
    return tuple(
        Opinion(**{**opinion, "verdicts": {i: Verdict(v) for i, v in opinion["verdicts"].items()}})
        for opinion in json.loads(text or "[]")
    )


def _row(step: int, seed: int, prompt_id: str, completion: Completion, grade: Grade) -> dict:
    return vars(completion) | {
        "prompt_id": prompt_id,
        "seed": seed,
        "policy_version": step,
        "reward": grade.score,
        "items": grade.items(),
        "weights": [weight for _, _, weight in grade.verdicts],
        "opinions": json.dumps([vars(one) for one in grade.opinions]) if grade.opinions else None,
        "steps": json.dumps(grade.steps) if grade.steps else None,
    }
