"""The records of sabia: Arrow schemas with versions, and how batches are cast to them.

A kind's columns come first and in this order; unknown columns are kept after them. `id` is that of
the input, else a 128-bit hash of source and text. Fields that hold free JSON (meta, tools,
tool_calls, rubric, detail) are strings of JSON, so that their bytes never change.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData
from sabia.core.shards import arrow_arrays
from sabia.core.shards.arrow_arrays import cast

VERSION = 2  # 1: scores were a map
BATCH_BYTES = 8 << 20  # of a batch of records
Reject = Callable[[dict[str, Any], str], None]  # a row, and why it is left out
ANSWERS = ("chosen", "rejected")  # of a preference
_TEXT = pa.string()
_INTS = pa.list_(pa.int32())
# fields of a message that earlier versions did not keep; ids do not depend on those that are null
LATER_FIELDS = ("reasoning_content", "thinking", "tool_call_id")
_MESSAGE = pa.struct(
    [("role", _TEXT), ("content", _TEXT), ("tool_calls", _TEXT), ("name", _TEXT),
     *((name, _TEXT) for name in LATER_FIELDS)]
)  # fmt: skip
_MESSAGES = pa.list_(_MESSAGE)
_ITEMS = pa.list_(pa.struct([("id", _TEXT), ("verdict", _TEXT), ("points", pa.float64())]))


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


@cache
def document(scores: tuple[str, ...] = ()) -> pa.Schema:
    """A page or text with scores of these names; the record of the data stages."""
    return _schema(
        id=_TEXT, text=_TEXT, url=_TEXT, source=_TEXT, language=_TEXT,
        crawl_time=pa.timestamp("us", tz="UTC"), scores=arrow_arrays.type_of(scores), meta=_TEXT,
    )  # fmt: skip


KINDS = {
    "document": document(),
    # a conversation to imitate
    "chat": _schema(id=_TEXT, messages=_MESSAGES, tools=_TEXT, meta=_TEXT),
    # a conversation to continue, with a reference answer and a rubric (JSON) to judge by
    "prompt": _schema(
        id=_TEXT, messages=_MESSAGES, tools=_TEXT, rubric=_TEXT, answer=_TEXT, meta=_TEXT
    ),
    # a conversation with a better and a worse continuation, of which one may be null: a text, or a
    # JSON list of messages that ends with one of the assistant. A text as prompt is a user's;
    # without one, it is what the messages begin with. One answer may be given as `completion`, with
    # the boolean `label`: true for a better one
    "preference": _schema(id=_TEXT, prompt=_MESSAGES, chosen=_TEXT, rejected=_TEXT),
    # a text with a teacher's predictions: input_ids[T], loss_mask[T] (null: all tokens but the
    # first count), and for each token that counts the teacher's K likeliest tokens and their
    # log-probabilities (natural log) at it; the fingerprint of the tokenizer
    "distillation": _schema(
        id=_TEXT, input_ids=_INTS, loss_mask=pa.list_(pa.bool_()), teacher_ids=pa.list_(_INTS),
        teacher_logprobs=pa.list_(pa.list_(pa.float32())), tokenizer=_TEXT,
    ),
    # a row of tokens of fixed length: input_ids[T], the lengths of its documents, loss_mask[T]; for
    # each of these the id of the document, and the number of its first token in the document
    "tokens": _schema(
        id=_TEXT, input_ids=_INTS, document_lengths=_INTS,
        loss_mask=pa.list_(pa.bool_()), source=_TEXT, document_ids=pa.list_(_TEXT),
        document_offsets=_INTS,
    ),
    # one sampled continuation: tokens[n], their log-probabilities[n] (natural log), reward
    "sample": _schema(
        prompt_id=_TEXT, seed=pa.int64(), tokens=_INTS, logprobs=pa.list_(pa.float32()),
        finish_reason=_TEXT, policy_version=pa.int64(), reward=pa.float64(), items=_ITEMS,
    ),
    # one metric of one item of one task
    "score": _schema(task=_TEXT, item_id=_TEXT, metric=_TEXT, value=pa.float64(), detail=_TEXT),
    # a row of any columns
    "any": _schema(),
}  # fmt: skip

# what a row cannot do without; everything else may be null
REQUIRED = {
    "document": ("text",), "chat": ("messages",), "prompt": ("messages",), "sample": ("tokens",),
    "tokens": ("input_ids", "document_lengths"), "score": ("task", "item_id", "value"),
    "distillation": ("input_ids", "teacher_ids", "teacher_logprobs", "tokenizer"),
    "preference": ("prompt",), "any": (),
}  # fmt: skip


def is_scores(kind: str, name: str) -> bool:
    """Whether a column of a kind holds named numbers, whose type follows from the names."""
    return kind == "document" and name == "scores"


def document_id(source: str | None, text: str) -> str:
    """128-bit BLAKE2b of source and text as 32 hexadecimal digits."""
    digest = hashlib.blake2b((source or "").encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def conform(
    batch: pa.RecordBatch, kind: str, scores: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Give a batch the kind's columns: cast, add missing ones as null, fill in missing ids.

    scores: the names of a document's scores; None: those that the batch has.

    Raises BadData when a required column is missing or of a type that cannot be cast.
    """
    schema = KINDS[kind]
    columns = {name: batch.column(name) for name in batch.schema.names}
    missing = [name for name in REQUIRED[kind] if name not in columns]
    if missing:
        raise BadData(
            f"not {kind} records: no column {missing[0]!r} among {', '.join(batch.schema.names)}"
        )
    known = [_fit(columns.pop(f.name, None), f, batch.num_rows, kind, scores) for f in schema]
    fields = [field.with_type(c.type) for field, c in zip(schema, known, strict=True)]
    fields += [batch.schema.field(name) for name in columns]
    whole = pa.RecordBatch.from_arrays([*known, *columns.values()], schema=pa.schema(fields))
    return _with_ids(whole, kind) if "id" in schema.names else whole


def _fit(
    column: pa.Array | None, field: pa.Field, rows: int, kind: str, scores: Sequence[str] | None
) -> pa.Array:
    if is_scores(kind, field.name):
        return arrow_arrays.fit(pa.nulls(rows) if column is None else column, scores)
    if column is None:
        return pa.nulls(rows, field.type)
    what = f"not {kind} records: column {field.name!r}"
    return cast(column, field.type, what, str(field.type))


def fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema: cast, null where the batch has none; raises BadData."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    arrays = [
        cast(batch.column(name), kind, f"column {name!r}", f"{kind}, as in other shards")
        if name in batch.schema.names
        else pa.nulls(batch.num_rows, kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_before(body: object) -> Any:
    """The body of a record as earlier versions read it, for its id."""
    if not isinstance(body, list) or not all(isinstance(part, dict) for part in body):
        return body
    return [
        {k: v for k, v in part.items() if v is not None or k not in LATER_FIELDS} for part in body
    ]


def _with_ids(batch: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    ids = batch.column("id")
    if not ids.null_count:
        return batch
    made, sources = [], pa.nulls(len(ids))
    if "source" in batch.schema.names:
        sources = batch.column("source")
    columns = (ids, sources, batch.column(REQUIRED[kind][0]))
    for given, source, body in zip(*(column.to_pylist() for column in columns), strict=True):
        text = body if isinstance(body, str) else repr(_as_before(body))
        made.append(document_id(source, text) if given is None else given)
    return batch.set_column(0, pa.field("id", _TEXT), pa.array(made, _TEXT))
