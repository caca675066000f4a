"""Between Python dictionaries and Arrow batches: JSON records in, JSON records out.

A JSON object becomes a row: the kind's own fields by name, scalar extras as columns (their
types are those of the first lines), and everything else is kept inside `meta`. A row
that cannot be converted is refused with a reason, never changed silently.
"""

import json
from collections.abc import Sequence, Set
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.shards.arrow_arrays import MAP, MOST_NAMES, as_dict
from sabia.core.shards.schemas import ANSWERS

_unread = set[str]()  # fields of messages that a note has named
_SCALARS: dict[type, pa.DataType] = {
    str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(),
}  # fmt: skip


def extra_fields(rows: Sequence[dict[str, Any]], kind: str) -> list[pa.Field]:
    """Columns for scalar fields that the kind does not know, typed by the rows given."""
    known = set(schemas.KINDS[kind].names)
    types: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in known and value is not None and _is_unicode(name):
                types.setdefault(name, set()).add(type(value))
    return [pa.field(n, t) for n, seen in types.items() if (t := _common(seen)) is not None]


def _common(seen: set[type]) -> pa.DataType | None:
    if seen == {int, float}:
        return pa.float64()
    return _SCALARS.get(next(iter(seen))) if len(seen) == 1 else None


def fit_row(row: dict[str, Any], kind: str, extras: Sequence[pa.Field]) -> dict[str, object]:
    """A row for `to_batch`; raises ValueError with the reason if it cannot be converted."""
    if kind == "preference":
        if isinstance(row.get("label"), bool) and not any(name in row for name in ANSWERS):
            row = {**row, ANSWERS[not row["label"]]: row.get("completion")}
        if row.get("prompt") is None:
            row = {**row, "prompt": _lead(row)}
    schema = schemas.KINDS[kind]
    extra_types = {field.name: field.type for field in extras}
    fitted: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in row.items():
        if schemas.is_scores(kind, name):
            fitted[name] = _numbers(name, value)
        elif name in schema.names:
            fitted[name] = _value(name, value, schema.field(name).type)
        elif name in extra_types:
            fitted[name] = _value(name, value, extra_types[name])
        else:
            rest[name] = value
    for name in schemas.REQUIRED[kind]:
        if fitted.get(name) is None:
            raise ValueError(f"no {name}")
    if rest and "meta" in schema.names:
        given = fitted.get("meta")
        try:
            before = json.loads(given) if given else {}
        except json.JSONDecodeError:  # a text
            before = given
        merged = before | rest if isinstance(before, dict) else {"meta": before} | rest
        fitted["meta"] = json.dumps(merged, ensure_ascii=False)
    return fitted


def _value(name: str, value: object, wanted: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(wanted):
        return _as_text(name, value)
    if pa.types.is_timestamp(wanted):
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    if pa.types.is_list(wanted) and pa.types.is_struct(wanted.value_type):
        if name == "prompt" and isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError(f"{name} is not a list of objects")
        kinds = {field.name: field.type for field in wanted.value_type}
        for item in value:
            _say_unread(name, item, kinds.keys())
        return [{n: _value(n, item.get(n), kind) for n, kind in kinds.items()} for item in value]
    try:
        return pa.scalar(value, wanted).as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"{name} is {value!r:.60} (expected {wanted})") from error


def _say_unread(name: str, item: dict[str, Any], known: Set[str]) -> None:
    """Say once of each field of a message that it is not read, such as a weight of its loss."""
    for field in item.keys() - known - _unread:
        if item[field] not in (None, "", [], {}):
            _unread.add(field)
            notes.note(f"field {field!r} of {name} is not read")


def with_json(batch: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    """A batch of another library, with the columns of the kind that hold free JSON or messages, but
    are nested, as in rows of JSON: free JSON as text; and with the prompts of preferences whose
    answers are whole conversations. Raises BadData."""
    if kind == "preference":
        batch = _judged_answers(batch)
    for field in schemas.KINDS[kind]:
        index = batch.schema.get_field_index(field.name)
        if index < 0 or schemas.is_scores(kind, field.name) or field.name == "text":
            continue
        column = batch.column(index)
        messages = pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)
        is_prompt = messages and field.name == "prompt" and pa.types.is_string(column.type)
        if column.type == field.type or not (is_prompt or pa.types.is_nested(column.type)):
            continue
        if not (messages or pa.types.is_string(field.type)):
            continue
        try:
            values = [_value(field.name, v, field.type) for v in map(_as_json, column.to_pylist())]
        except (ValueError, TypeError) as error:
            raise BadData(f"column {field.name!r}: {error}") from error
        batch = batch.set_column(index, field, pa.array(values, field.type))
    if kind == "preference" and "prompt" not in batch.schema.names:
        answers = batch.select([name for name in ANSWERS if name in batch.schema.names])
        field = schemas.KINDS[kind].field("prompt")
        values = [_value("prompt", _lead(row), field.type) for row in answers.to_pylist()]
        if values and not any(values):
            raise BadData("no column 'prompt', and no answer is a whole conversation")
        batch = batch.append_column(field, pa.array(values, field.type))
    return batch


def _judged_answers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With `completion` as the chosen answer where `label` is true, else as the rejected one."""
    names = batch.schema.names
    if not {"completion", "label"} <= set(names) or any(name in names for name in ANSWERS):
        return batch
    label, answer = batch.column("label"), batch.column("completion")
    if not pa.types.is_boolean(label.type):
        return batch
    none = pa.nulls(len(batch), answer.type)
    for name, mask in zip(ANSWERS, (label, pc.invert(label)), strict=True):
        batch = batch.append_column(name, pc.if_else(mask, answer, none))
    return batch


def _lead(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages before the answer, of an answer that is a whole conversation."""
    for name in ANSWERS:
        messages = row.get(name)
        if isinstance(messages, str):
            messages = json_messages(messages)
        if isinstance(messages, list) and len(messages) > 1:
            return messages[:-1]
    return None


def json_messages(answer: str) -> list[dict[str, Any]] | None:
    """The messages of a text that is a JSON list of them; None for any other text."""
    if not answer.lstrip().startswith("[{"):
        return None
    try:
        parsed = json.loads(answer)
    except ValueError:
        return None
    is_list = all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in parsed)
    return parsed if is_list else None


def _as_json(value: object) -> Any:
    """A value of `to_pylist` as JSON has it: the pairs of a map are an object."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(one, tuple) for one in value):
        return {str(name): _as_json(one) for name, one in value}
    return [_as_json(one) for one in value]


def _numbers(name: str, value: object) -> list[tuple[str, float]] | None:
    """The entries of an object that have a number."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__} (expected an object)")
    if (bad := unusable_names(value)) is not None:
        raise ValueError(f"{name} has {bad}")
    return [(str(k), float(v)) for k, v in value.items() if v is not None]


def unusable_names(numbers: dict[str, Any]) -> str | None:
    """Why the names of one row's numbers cannot be columns, or None."""
    if len(numbers) > MOST_NAMES:
        return f"more than {MOST_NAMES:,} names"
    return None if all(map(_is_unicode, numbers)) else "a name with a lone surrogate"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_text(name: str, value: object) -> str:
    if isinstance(value, str):
        if not _is_unicode(value):
            raise ValueError(f"{name} holds a lone surrogate, which is not Unicode text")
        return value
    if name == "text":
        raise ValueError(f"text is {type(value).__name__} (expected a string)")
    return json.dumps(value, ensure_ascii=False, default=str)


def to_batch(
    rows: Sequence[dict[str, Any]],
    kind: str,
    extras: Sequence[pa.Field] = (),
    scores: Sequence[str] | None = None,
) -> pa.RecordBatch:
    """Rows from `fit_row` as one batch that conforms to the kind.

    The scores of a row are (name, number) pairs; `scores` names those of the batch, see `conform`.
    """
    fields = [
        f.with_type(MAP) if schemas.is_scores(kind, f.name) else f for f in schemas.KINDS[kind]
    ]
    schema = pa.schema([*fields, *extras])
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    return schemas.conform(pa.RecordBatch.from_arrays(arrays, schema=schema), kind, scores)


def to_json(row: dict[str, Any]) -> str:
    """One row of `RecordBatch.to_pylist` as a line of JSON; maps become objects.

    Scores that the row does not have are left out, and values that are nested too deep.
    """
    plain = {k: _plain(k, v) for k, v in row.items()}
    try:
        return json.dumps(plain, ensure_ascii=False, default=str)
    except RecursionError:
        flat = {k: v for k, v in plain.items() if not isinstance(v, list | dict)}
        return json.dumps(flat, ensure_ascii=False, default=str)


def _plain(name: str, value: object) -> Any:
    if name == "scores" and isinstance(value, dict):
        return as_dict(value)
    if isinstance(value, list) and value and all(isinstance(v, tuple) for v in value):
        return dict(value)
    return value
