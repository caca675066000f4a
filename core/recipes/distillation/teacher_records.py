"""`sft teacher`: conversations → distillation records, with a teacher's likeliest tokens.

Each conversation is rendered by the teacher's chat template. At each token of the assistant the
record has the teacher's likeliest tokens and their log-probabilities (natural log, over its whole
vocabulary), from the text before the token. A record does not depend on which others are computed
with it, beyond the rounding of products of another size.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.generate.chat import render_rows
from sabia.core.generate.chat_variables import template_variables
from sabia.core.generate.model_directory import model_fingerprint
from sabia.core.generate.template_engine import chat_template
from sabia.core.model import forward
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.options.sft import TeacherOptions
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.shards import schemas
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.spec import load_spec
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer

SCHEMA = schemas.KINDS["distillation"]
BATCH_TOKENS = 8192
LOGIT_BYTES = 256 << 20


def run(job: Job, options: TeacherOptions) -> None:
    """Write the records of the job's conversations; raises what its parts raise."""
    spec = load_spec(options.teacher)
    check_predicts(spec)
    tokenizer = load_tokenizer(options.teacher, "--teacher")
    chat_template(tokenizer, f"--teacher: {options.teacher}")
    transform = partial(
        _records, options=options, backend=job.backend,
        variables=template_variables(options.chat, tokenizer),
    )  # fmt: skip
    run_map(
        job, transform, "chat", "distillation", schema=SCHEMA,
        salt=model_fingerprint(options.teacher, "--teacher"),
        next_step="sabia sft --loss distill",
    )  # fmt: skip


def _records(
    batches: Iterator[pa.RecordBatch], context: ShardContext, options: TeacherOptions,
    backend: str, variables: dict[str, Any],
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    teacher = _Teacher(options.teacher, options.top, backend)
    for batch in batches:
        rendered: list[tuple[str, list[int], list[int]]] = []
        for row in batch.select(["id", "messages", "tools"]).to_pylist():
            try:
                rows = render_rows(row["messages"], teacher.tokenizer, row["tools"], **variables)
            except BadData as error:
                context.reject(row, str(error))
                continue
            for number, (ids, mask) in enumerate(rows):
                if len(ids) > min(options.length, teacher.spec.max_positions):
                    context.reject(row, f"{len(ids)} tokens (expected at most --length)")
                elif not any(mask[1:]):
                    context.reject(row, "no token of the assistant follows another")
                else:
                    name = f"{row['id']}/{number}" if number else row["id"]
                    rendered.append((name, list(ids), [0, *mask[1:]]))
        yield teacher.scored(rendered)


@cache  # one for a process
class _Teacher:
    """A model and its tokenizer; `scored` makes records."""

    def __init__(self, path: str, top: int, backend: str) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(path, "--teacher")
        self.spec, params = load_stored(path)
        self.top = min(top, self.spec.vocab_size - 1)
        self.ops = ops_as_served(backend, self.spec)
        self.params = self.ops.to_device(params, "float32")

    def scored(self, rendered: list[tuple[str, list[int], list[int]]]) -> pa.RecordBatch:
        """The records of (id, token ids, mask)."""
        order = sorted(range(len(rendered)), key=lambda n: len(rendered[n][1]))
        made: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        while order:
            stop.check()
            longest = len(rendered[order[-1]][1])
            some = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // longest)))]
            made |= dict(zip(some, self._top([rendered[n] for n in some]), strict=True))
        columns = [[name for name, *_ in rendered], [ids for _, ids, _ in rendered],
                   [[bool(flag) for flag in mask] for *_, mask in rendered],
                   [made[n][0].tolist() for n in range(len(rendered))],
                   [made[n][1].tolist() for n in range(len(rendered))],
                   [self.tokenizer.fingerprint] * len(rendered)]  # fmt: skip
        arrays = [pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def _top(self, some: list[tuple[str, list[int], list[int]]]) -> list[Any]:
        """For each text ids int32[n, K] and log-probabilities float32[n, K], the likeliest first,
        the lower id first among equals."""
        width = max(len(ids) for _, ids, _ in some)
        inputs, counted = np.zeros((len(some), width), np.int32), np.zeros((len(some), width), bool)
        for row, (_, tokens, mask) in enumerate(some):
            inputs[row, : len(tokens)] = tokens
            counted[row, : len(tokens) - 1] = mask[1:]  # the token before predicts
        x = forward.hidden(self.spec, self.params, inputs, self.ops)
        rows, columns = np.nonzero(counted)
        x = x[rows, columns][None]  # [1, n, D]
        parts = []
        step = max(1, LOGIT_BYTES // (8 * self.spec.vocab_size))
        for start in range(0, len(rows), step):
            scores = forward.logits(self.spec, self.params, x[:, start : start + step], self.ops)
            parts.append(self._likeliest(self.ops.to_numpy({"x": scores})["x"][0]))
        ids, logprobs = (np.concatenate(both) for both in zip(*parts, strict=True))
        ends = np.cumsum(counted.sum(1))[:-1]
        return list(zip(np.split(ids, ends), np.split(logprobs, ends), strict=True))

    def _likeliest(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = scores.astype(np.float64)
        largest = wide.max(-1, keepdims=True)
        lse = largest + np.log(np.exp(wide - largest).sum(-1, keepdims=True))
        ids = np.argsort(-wide, -1, kind="stable")[:, : self.top].astype(np.int32)
        return ids, (np.take_along_axis(wide, ids, -1) - lse).astype(np.float32)
