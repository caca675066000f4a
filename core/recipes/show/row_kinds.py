"""The kinds of rows, recognised by their columns, and how each is shown."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sabia.core.errors import BadData, SabiaError, UsageError
from sabia.core.recipes.report.token_row import piece_bounds
from sabia.core.recipes.show import parts
from sabia.core.recipes.show.parts import ADDED, MASKED, QUIET, REMOVED, TRAINED, Part, Span
from sabia.core.recipes.show.reading import Row
from sabia.core.recipes.show.related import INPUTS, OUT, Related
from sabia.core.shards.arrow_arrays import as_dict
from sabia.core.text.tokenize.tokenizer import Tokenizer

Shown = Callable[[Sequence[Row], Related], Iterator[Part]]
MOST_HELD = 4_096  # rows of a group that are shown together
MOST_SCORES = 12  # of a row that are shown
MOST_IDS = 500  # ids of tokens that are shown where there is no tokenizer


@dataclass(frozen=True)
class Kind:
    """Rows with these columns. show: the parts of the rows of a group, which have the same values
    in the columns `group`; refers: the column with the id of another row, and its role."""

    name: str
    columns: tuple[str, ...]
    show: Shown
    group: tuple[str, ...] = ()
    refers: tuple[str, str] | None = None

    def key(self, row: Row) -> tuple[str, ...]:
        """The group of a row."""
        return tuple(str(row.values.get(name)) for name in self.group)


def kind_of(values: Mapping[str, Any]) -> Kind:
    """The kind of a row: the first in KINDS of which it has all columns."""
    names = {name for name, value in values.items() if value is not None}
    return next(kind for kind in KINDS if names.issuperset(kind.columns))


def parts_of(chunks: Iterable[Sequence[Row]], related: Related) -> Iterator[Part]:
    """The parts of rows; those of a group that are read together are shown together."""
    for chunk in _whole_groups(chunks):
        for name, same in groupby(chunk, lambda row: kind_of(row.values).name):
            kind = next(one for one in KINDS if one.name == name)
            rows = _grouped([*same], kind)
            if kind.refers:
                related.look_up(rows, *kind.refers)
            for _, group in groupby(rows, kind.key if kind.group else lambda row: row[1:]):
                yield from kind.show([*group], related)


def _whole_groups(chunks: Iterable[Sequence[Row]]) -> Iterator[list[Row]]:
    """The rows, cut between groups (or after MOST_HELD rows of one)."""
    held = list[Row]()
    try:
        for chunk in chunks:
            rows = [*held, *chunk]
            kind = kind_of(rows[-1].values)
            last, cut = kind.key(rows[-1]), len(rows)
            while kind.group and cut and kind_of(rows[cut - 1].values) == kind:
                if kind.key(rows[cut - 1]) != last or len(rows) - cut >= MOST_HELD:
                    break
                cut -= 1
            held = rows[cut:]
            if cut:
                yield rows[:cut]
    except SabiaError:  # after what could be read
        if held:
            yield held
        raise
    if held:
        yield held


def _grouped(rows: Sequence[Row], kind: Kind) -> list[Row]:
    """Rows with those of a group next to each other, in the order of their first ones."""
    first = dict[tuple[str, ...], int]()
    keys = [kind.key(row) for row in rows]
    for number, key in enumerate(keys):
        for depth in range(len(key)):
            first.setdefault(key[: depth + 1], number)
    order = [[first[key[: depth + 1]] for depth in range(len(key))] for key in keys]
    return [rows[n] for n in sorted(range(len(rows)), key=lambda n: order[n])]


def _title(row: Row, words: str, note: str = "") -> Part:
    return parts.title(f"{words}, {note}" if note else words, address_of(row))


def address_of(row: Row) -> str:
    """Where a row is."""
    return f"{row.source.name}, row {row.number:,}"


def fields(values: Mapping[str, Any], without: Iterable[str] = ()) -> Iterator[Part]:
    """The columns that have a value, except some."""
    left_out = {*without, "id"}
    for name, value in values.items():
        if name not in left_out and (shown := shown_value(name, value)):
            yield parts.field(name, shown)


def shown_value(name: str, value: object) -> str:
    """A value of a column on a line; '' for null and empty ones."""
    if value is None or value in ("", [], {}):
        return ""
    if name == "scores" and isinstance(value, dict | list):
        numbers = [f"{one} {number:.4g}" for one, number in as_dict(value).items()]
        more = len(numbers) - MOST_SCORES
        return ", ".join(numbers[:MOST_SCORES]) + f" and {more} more" * (more > 0)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _head(row: Row, name: str, without: Iterable[str] = (), note: str = "") -> Iterator[Part]:
    """The title of a row and its columns, except some."""
    named = name if row.values.get("id") is None else f"{name} {row.values['id']}"
    yield _title(row, named, note)
    yield from fields(row.values, without)


def _document(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    for row in rows:
        yield from _head(row, "document", ("text",))
        yield parts.text(str(row.values["text"]), related.chars)


def _removed(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    """Removed rows of the same reason and, where there is one, the same kept document."""
    shown = None
    for row in rows:
        values = row.values
        yield from _head(row, "removed", ("text", "cluster", "cluster_size"), str(values["reason"]))
        kept = related.get(values["kept_id"]) if values.get("kept_id") else None
        if kept is None:
            if values.get("kept_id"):
                yield parts.heading("removed; the document that was kept is not found", REMOVED)
            yield parts.text(str(values["text"]), related.chars)
            continue
        if shown != values["kept_id"]:
            yield parts.heading(f"kept: {kept.get('url') or kept['id']}", ADDED)
            yield parts.text(str(kept.get("text")), related.chars)
            shown = values["kept_id"]
        yield parts.heading("removed, as a difference to the kept one", REMOVED)
        changes = parts.difference(str(kept.get("text")), str(values["text"]))
        yield parts.spans(changes, related.chars)


def _cluster(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    """Rows of a cluster: the first as it is, the others as differences to it."""
    rows = sorted(rows, key=lambda row: row.values.get("id") != row.values["cluster"])
    first: str | None = None
    for row in rows:
        values = row.values
        words = values.get("text") or (related.get(values.get("id")) or {}).get("text")
        yield from _head(row, "document", ("text",))
        if words is None:
            continue
        if first is None:
            first = str(words)
            yield parts.text(first, related.chars)
        else:
            yield parts.heading("as a difference to the first of the cluster")
            yield parts.spans(parts.difference(first, str(words)), related.chars)


def _rewrite(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    for row in rows:
        values = row.values
        before = related.get(values.get("id"))
        yield from _head(row, "document", ("text",), str(values["rewrite_verdict"]))
        if before is not None and before.get("text") is not None:
            yield parts.heading("as a difference to the text before the rewrite")
            changes = parts.difference(str(before["text"]), str(values["text"]))
            yield parts.spans(changes, related.chars)
        else:
            yield parts.text(str(values["text"]), related.chars)


def _rejected(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    """Rejected rows, each with the record that was rejected as it would be shown."""
    for row in rows:
        values = row.values
        yield _title(row, "rejected")
        yield parts.field("reason", values["reason"])
        yield parts.field("of", values["shard"])
        try:
            record = json.loads(values["record"])
        except (ValueError, TypeError, RecursionError):
            record = None
        if not isinstance(record, dict):
            yield parts.text(str(values["record"]), related.chars)
            continue
        kind = kind_of(record)
        inner = kind.show([row._replace(values=record)], related) if kind.name != "rejected" else ()
        yield from (part for part in inner if part.role != parts.TITLE)


def _tokens(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    for row in rows:
        values = row.values
        ids, mask = values["input_ids"], values.get("loss_mask")
        names = ("input_ids", "document_lengths", "document_ids", "document_offsets", "loss_mask")
        yield from _head(row, "token row", (*names, "digest"), f"{len(ids):,} tokens")
        tokenizer = related.tokenizer_of(row.source)
        if tokenizer is None:
            yield parts.field("tokenizer", "none next to the rows; --tokenizer DIR shows the text")
        lengths = values["document_lengths"]
        documents = values.get("document_ids") or [None] * len(lengths)
        offsets = values.get("document_offsets") or [0] * len(lengths)
        for number, (start, end) in enumerate(piece_bounds(lengths)):
            own = [True] * (end - start) if mask is None else mask[start:end]
            about = f"tokens {start:,} to {end - 1:,}: document {number + 1} of {len(lengths)}"
            if number < len(documents) and documents[number] is not None:
                first = offsets[number]
                about += f", {documents[number]} from its token {first:,} on"
            lost = own.count(False)
            yield parts.heading(about + (f"; {lost:,} without loss" if lost else ""))
            yield parts.spans(_runs(ids[start:end], own, tokenizer), related.chars)
        if left := len(ids) - sum(lengths):
            yield parts.heading(f"padding: {left:,} tokens", QUIET)


def _runs(ids: Sequence[int], mask: Sequence[bool], tokenizer: Tokenizer | None) -> Iterator[Span]:
    """The texts of tokens that follow each other and have, or have no, loss."""
    start = 0
    for has_loss, run in groupby(mask):
        end = start + len([*run])
        style = TRAINED if has_loss else MASKED
        yield style, decoded(ids[start:end], tokenizer)
        start = end


def decoded(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of tokens; their ids without a tokenizer."""
    if tokenizer is not None:
        return tokenizer.decode(ids)
    more = f" … {len(ids) - MOST_IDS:,} more" if len(ids) > MOST_IDS else ""
    return " ".join(map(str, ids[:MOST_IDS])) + more


def _chat(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    for row in rows:
        values = row.values
        yield from _head(row, "conversation", ("messages",))
        tokenizer = related.given_tokenizer
        if tokenizer is None:
            yield from _turns(values["messages"], related.chars)
            continue
        from sabia.core.generate.chat import assistant_spans

        try:
            text, written = assistant_spans(values["messages"], tokenizer, values.get("tools"))
        except (BadData, UsageError) as error:
            yield parts.field("not rendered", error)
            yield from _turns(values["messages"], related.chars)
            continue
        yield parts.spans(_masked(text, written), related.chars)


def _masked(text: str, written: Iterable[tuple[int, int]]) -> Iterator[Span]:
    """A rendered conversation, of which the assistant's parts have loss."""
    at = 0
    for start, end in written:
        yield MASKED, text[at:start]
        yield TRAINED, text[start:end]
        at = end
    yield MASKED, text[at:]


def _turns(messages: object, chars: int) -> Iterator[Part]:
    """The messages of a conversation, or the text that is instead of them."""
    if not isinstance(messages, list):
        yield parts.text(str(messages), chars)
        return
    for message in messages:
        if not isinstance(message, dict):
            yield parts.text(str(message), chars)
            continue
        yield parts.heading(str(message.get("role")))
        others = {k: v for k, v in message.items() if k not in ("role", "content", "text")}
        yield from fields(others)
        content = message.get("content")
        if content:
            yield parts.text(shown_value("content", content), chars)


def _preference(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    for row in rows:
        values = row.values
        yield from _head(row, "preference", ("prompt", "chosen", "rejected"))
        yield from _turns(values["prompt"], related.chars)
        for name, style in (("chosen", ADDED), ("rejected", REMOVED)):
            yield parts.heading(name, style)
            yield from _turns(values[name], related.chars)


def _samples(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    """The samples of a prompt, by falling reward."""
    first = rows[0].values
    rewards = [row.values["reward"] for row in rows if row.values.get("reward") is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    words = f"prompt {first['prompt_id']}, step {(first.get('policy_version') or 0) + 1}"
    yield _title(rows[0], words, f"{len(rows)} samples shown{mean}")
    prompt = related.get(first["prompt_id"])
    if prompt is not None:
        yield from _turns(prompt.get("messages"), related.chars)
        yield from fields({name: prompt.get(name) for name in ("answer", "rubric")})
    for row in sorted(rows, key=lambda one: -(one.values.get("reward") or 0)):
        values = row.values
        reward = values.get("reward")
        tokens = values["tokens"]
        good = reward is not None and bool(rewards) and reward > sum(rewards) / len(rewards)
        yield parts.heading(
            f"sample {values.get('sample') if values.get('sample') is not None else row.number}: "
            f"reward {'none' if reward is None else f'{reward:.4g}'}, {len(tokens):,} tokens, "
            f"{values.get('finish_reason') or 'no finish reason'}",
            ADDED if good else REMOVED if reward is not None and rewards and reward < max(rewards)
            else parts.NAME,
        )  # fmt: skip
        for item in values.get("items") or ():
            points = "" if item.get("points") is None else f", {item['points']:g} points"
            yield parts.field(f"{item.get('id')}", f"{item.get('verdict')}{points}")
        text = values.get("text")
        if text is None:
            text = decoded(tokens, related.tokenizer_of(row.source))
        yield parts.text(text, related.chars)


def _scores(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    """The metrics of an item and its answers."""
    first = rows[0].values
    words = ", ".join(str(first[name]) for name in ("task", "item_id"))
    yield _title(rows[0], f"item {words}", str(first.get("model") or ""))
    for sample, of_sample in groupby(rows, lambda row: row.values.get("sample")):
        same = [row.values for row in of_sample]
        if sample:
            yield parts.heading(f"sample {sample}")
        for values in same:
            yield parts.field(
                values.get("metric") or "share", shown_value("value", values["value"])
            )
        for detail in (values["detail"] for values in same if values.get("detail")):
            yield from _detail(detail, related.chars)


def _detail(detail: object, chars: int) -> Iterator[Part]:
    try:
        record = json.loads(detail) if isinstance(detail, str) else detail
    except (ValueError, RecursionError):
        record = detail
    if not isinstance(record, dict):
        yield parts.text(str(record), chars)
        return
    short = {k: v for k, v in record.items() if not (isinstance(v, str) and len(v) > 60)}
    yield from fields(short)
    for name, value in record.items():
        if name not in short:
            yield parts.heading(name)
            yield parts.text(value, chars)


def _any(rows: Sequence[Row], related: Related) -> Iterator[Part]:
    for row in rows:
        title, *columns = _head(row, "row")
        yield title
        for part in columns:
            yield part._replace(spans=parts.spans(part.spans, related.chars).spans)


# the first of which a row has all columns
KINDS = (
    Kind("rejected", ("reason", "shard", "record"), _rejected),
    Kind("samples", ("prompt_id", "tokens"), _samples, ("policy_version", "prompt_id"),
         ("prompt_id", INPUTS)),
    Kind("tokens", ("input_ids", "document_lengths"), _tokens),
    Kind("scores", ("task", "item_id", "value"), _scores, ("model", "task", "item_id")),
    Kind("preferences", ("prompt", "chosen", "rejected"), _preference),
    Kind("removed", ("reason", "text"), _removed, ("reason", "kept_id"), ("kept_id", OUT)),
    Kind("rewritten", ("rewrite_verdict", "text"), _rewrite, (), ("id", INPUTS)),
    Kind("decisions", ("cluster", "kept", "reason"), _cluster, ("cluster",), ("id", INPUTS)),
    Kind("clusters", ("cluster", "text"), _cluster, ("cluster",)),
    Kind("conversations", ("messages",), _chat),
    Kind("documents", ("text",), _document),
    Kind("rows", (), _any),
)  # fmt: skip
