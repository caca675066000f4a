"""From a token to its document: the row, the characters of the text, and what each stage recorded.

A row names the documents of its pieces and the number of a piece's first token in its document. The
text is that of the last given output in which the document gives the tokens of the piece; the
characters of a token follow from tokenizing it again.
"""

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.report.given_outputs import Output, provenance_of, rejected_with, rows_with
from sabia.core.recipes.report.token_row import ADDRESS_HINT, Piece, TokenRow
from sabia.core.shards.arrow_arrays import as_dict
from sabia.core.shards.layout import TOKENIZER
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer

AROUND = 60  # characters shown on each side of a token
MOST_LINES = 2_000  # of texts that are compared line by line
SHOWN_CHANGE = 400  # characters of a change


@dataclass(frozen=True)
class Record:
    """A document in an output: where it is, and its columns."""

    output: Output
    shard: Source
    number: int
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Chains:
    """Finds the documents of pieces; outputs: see `open_outputs`; tokenizer: its directory, '' for
    the one beside the rows; variables: of the chat template."""

    outputs: Sequence[Output]
    tokenizer: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)

    def of_piece(
        self, row: TokenRow, piece: Piece, position: int | None, made: Mapping[str, Any],
        tokenizers: Sequence[str],
    ) -> dict[str, object]:  # fmt: skip
        """The document of a piece, with the token at a position if one is given. made: the
        provenance of the row's shard; tokenizers: directories in which the tokenizer may be."""
        if piece.document is None:
            return {"address": f"the row has none; {ADDRESS_HINT}"}
        answer: dict[str, Any] = {
            "id": piece.document,
            "tokens": [piece.offset, piece.offset + piece.end - piece.start],
        }
        records = self.records(piece.document, made)
        texts = [record for record in records if _is_whole(record)]
        if not texts:
            outputs = [output.path for output in self.outputs if output.kind != "tokens"]
            where = f"in none of {', '.join(outputs)}" if outputs else "give the documents as PATH"
            return answer | {"text": where}
        tokenizer = self._tokenizer(tokenizers)
        expected = row.ids[piece.start : piece.end]
        read = None
        for record in reversed(texts):
            ids, spans, text = _encoded(record, tokenizer, self.variables)
            if np.array_equal(ids[piece.offset : piece.offset + len(expected)], expected):
                read = record
                if position is not None:
                    number = piece.offset + position - piece.start
                    answer |= _token(text, spans, number)
                break
        if read is None:
            answer["text"] = "changed: none of the given outputs gives the tokens of the row"
        else:
            answer["text_of"] = f"{read.output.path} ({read.shard.name}, row {read.number})"
        return answer | {"stages": stages_of(records)}

    def records(self, name: str, made: Mapping[str, Any]) -> list[Record]:
        """The rows of a document in all outputs, in their order. The shards that a shard was made
        of are searched first, and others only if those lack the document."""
        origins, known = set(made.get("origins", [])), list[Record]()
        for output in reversed(self.outputs):
            if output.kind == "tokens":
                continue
            near = [source for source in output.sources if source.origin in origins]
            far = [source for source in output.sources if source not in near]
            here = [*_records(output, near, name)] or [*_records(output, far, name)]
            for record in here:
                origins |= set(provenance_of(record.shard).get("origins", []))
            known = here + known
        return known

    def _tokenizer(self, directories: Sequence[str]) -> Tokenizer:
        if self.tokenizer:
            return load_tokenizer(self.tokenizer, "--tokenizer")
        for directory in directories:
            if directory and (Path(directory) / "tokenizer.json").is_file():
                return load_tokenizer(directory)
        raise UsageError(
            f"no tokenizer in {', '.join(filter(None, directories)) or 'the record of the rows'}; "
            "give --tokenizer DIR"
        )


def tokenizers_beside(shard: str, made: Mapping[str, Any]) -> list[str]:
    """Where the tokenizer of a shard of token rows may be."""
    recorded = made.get("options", {}).get("tokenizer")
    return [str(Path(shard).parent / TOKENIZER), *([recorded] if recorded else [])]


def _records(output: Output, sources: Sequence[Source], name: str) -> Iterator[Record]:
    wanted = {"id": pa.array([name])}
    for source in sources:
        if output.kind == "rejects":
            for record in rejected_with(source, wanted):
                yield Record(output, source, -1, record)
            continue
        for numbers, table in rows_with(source, wanted):
            for number, row in zip(numbers.tolist(), table.to_pylist(), strict=True):
                yield Record(output, source, number, row)


def _is_whole(record: Record) -> bool:
    """Whether a row is the document itself: not removed, and no reject."""
    return record.output.kind in ("document", "chat")


def _encoded(
    record: Record, tokenizer: Tokenizer, variables: Mapping[str, Any]
) -> tuple[np.ndarray, list[tuple[int, int]], str]:
    """(ids int32[n], the characters of each, the text): a document as tokenize encodes it, or the
    renderings of a conversation one after the other."""
    if record.output.kind == "document":
        text = record.columns["text"]
        (ids,), (spans,) = tokenizer.encode_ordinary_with_offsets([text])
        if tokenizer.eos_id is not None:
            ids, spans = [*ids, tokenizer.eos_id], [*spans, (len(text), len(text))]
        return np.array(ids, np.int32), spans, text
    from sabia.core.generate.chat import row_texts

    columns, texts = record.columns, list[str]()
    with contextlib.suppress(BadData):  # a conversation that training rejects
        texts = row_texts(columns["messages"], tokenizer, columns.get("tools"), **variables)
    ids, spans, length = [], [], 0
    for one in texts:
        more, offsets = tokenizer.encode_with_offsets(one)
        ids += more
        spans += [(start + length, end + length) for start, end in offsets]
        length += len(one)
    return np.array(ids, np.int32), spans, "".join(texts)


def _token(text: str, spans: Sequence[tuple[int, int]], number: int) -> dict[str, object]:
    """Token `number` of a document in its text."""
    start, end = spans[number]
    before, after = text[max(0, start - AROUND) : start], text[end : end + AROUND]
    if start == end == len(text):
        return {"token": number, "characters": [start, end], "end_of_document": True,
                "context": before}  # fmt: skip
    return {
        "token": number,
        "characters": [start, end],
        "context": f"{before}[{text[start:end]}]{after}",
    }


def stages_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each output records about a document: the columns that are new or changed, and the
    changes of the text."""
    stages: list[dict[str, Any]] = []
    known: dict[str, Any] = {}
    for record in records:
        columns = _plain(record.columns)
        text = columns.pop("text", None)
        stage = {
            "output": record.output.path,
            "command": provenance_of(record.shard).get("command", ""),
            "kind": record.output.kind,
            "shard": record.shard.name,
            "row": record.number,
            "columns": {k: v for k, v in columns.items() if known.get(k) != v},
        }
        if isinstance(text, str):
            stage["characters"] = len(text)
            before = known.get("text")
            if before is not None and before != text and _is_whole(record):
                stage["changes"] = _changes(before, text)
        stages.append(stage)
        if _is_whole(record):
            known = columns | ({"text": text} if text is not None else {})
    return stages


def _plain(columns: Mapping[str, Any]) -> dict[str, object]:
    """Columns with a value; free JSON and scores as objects."""
    plain = {}
    for name, value in columns.items():
        if name == "scores" and value:
            value = as_dict(value)
        elif name == "meta" and isinstance(value, str):
            value = json.loads(value)
        if value not in (None, "", [], {}):
            plain[name] = value
    return plain


def _changes(before: str, after: str) -> list[dict[str, str]]:
    """The parts that differ: by lines, or between the common ends of very long texts."""
    old, new = before.splitlines(True), after.splitlines(True)
    if max(len(old), len(new)) > MOST_LINES:
        start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                     min(len(before), len(after)))  # fmt: skip
        return [{"before": _short(before[start:]), "after": _short(after[start:])}]
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [
        {"before": _short("".join(old[a:b])), "after": _short("".join(new[c:d]))}
        for kind, a, b, c, d in blocks
        if kind != "equal"
    ]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHANGE else f"{text[:SHOWN_CHANGE]}…"
