"""A table that a judge may look things up in: rows of a Parquet file by key, else by words.

A query that equals keys (Unicode NFC, without case, runs of white space as one space) gives their
rows; any other query those with the highest BM25 score (Robertson and Zaragoza 2009, k1 = 1.2,
b = 0.75) of its words in key and text, in the order of the file among equals. Words are runs of
letters and digits without case. The table and the index of its words are kept in memory.

The judge's model calls it as the tool `lookup` of an OpenAI-compatible server: at most CALLS times
in a question, each for at most ROWS rows of at most CHARACTERS characters.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.digests import parquet_at
from sabia.core.errors import UsageError
from sabia.core.files import unreadable
from sabia.core.generate.calls import ChatRequest, ChatResponse
from sabia.core.judge.verifiers import normal

CALLS, ROWS, CHARACTERS = 4, 3, 2000
K1, B = 1.2, 0.75
NAME = "lookup"
_WORD = re.compile(r"[^\W_]+")
Hit = tuple[str, str]  # key, text


@dataclass(frozen=True)
class LookupTable:
    """A Parquet file with a column of keys and one of texts; about: what it holds, for the model.

    Raises UsageError when it is read if the file or a column is missing.
    """

    path: str
    key: str = "id"
    text: str = "text"
    about: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the file and the columns' names, 32 hexadecimal digits."""
        try:
            digest = hashlib.blake2b(Path(self.path).read_bytes(), digest_size=16)
        except OSError as error:
            raise unreadable("--judge: lookup", self.path, error) from error
        digest.update(f"\0{self.key}\0{self.text}\0{self.about}".encode())
        return digest.hexdigest()

    @cached_property
    def rows(self) -> Sequence[Hit]:
        """The rows; null as ''."""
        try:
            with parquet_at(Path(self.path)) as file:
                names = file.schema_arrow.names
                if missing := [name for name in (self.key, self.text) if name not in names]:
                    raise UsageError(
                        f"--judge: lookup: {self.path}: no column {missing[0]!r} among "
                        f"{', '.join(names)}"
                    )
                table = file.read(columns=[self.key, self.text])
            columns = [table[name].cast(pa.string()).to_pylist() for name in (self.key, self.text)]
        except OSError as error:
            raise unreadable("--judge: lookup", self.path, error) from error
        except pa.ArrowInvalid as error:
            line = " ".join(str(error).split())
            raise UsageError(f"--judge: lookup: {self.path}: {line} (expected texts)") from error
        return [(key or "", text or "") for key, text in zip(*columns, strict=True)]

    @cached_property
    def _by_key(self) -> dict[str, list[int]]:
        by_key: dict[str, list[int]] = {}
        for number, (key, _) in enumerate(self.rows):
            by_key.setdefault(normal(key).casefold(), []).append(number)
        return by_key

    @cached_property
    def _index(self) -> "_WordIndex":
        return _WordIndex([f"{key} {text}" for key, text in self.rows])

    @cached_property
    def counts(self) -> Counter[str]:
        """`questions` that could use the table, and `lookups` that were made."""
        return Counter()

    def load(self) -> None:
        """Read the file and index it."""
        _ = self.rows, self._by_key, self._index

    def search(self, query: str) -> list[Hit]:
        """At most ROWS rows that answer a query, best first."""
        hits = self._by_key.get(normal(query).casefold()) or self._index.best(query, ROWS)
        return [self.rows[number] for number in hits[:ROWS]]

    @property
    def tool(self) -> dict[str, object]:
        """The tool as requests offer it."""
        about = self.about or "a table of reference texts"
        description = f"Look up a key or words in {about}. Returns at most {ROWS} texts."
        query = {"type": "string", "description": "a key, or words that the text contains"}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        function = {"name": NAME, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}


class _WordIndex:
    """The words of texts, for BM25 scores."""

    def __init__(self, texts: Sequence[str]) -> None:
        postings: dict[str, list[tuple[int, int]]] = {}
        lengths = np.zeros(len(texts))
        for number, text in enumerate(texts):
            counts = Counter(_words(text))
            lengths[number] = counts.total()
            for word, count in counts.items():
                postings.setdefault(word, []).append((number, count))
        self.postings = {word: np.array(pairs).T for word, pairs in postings.items()}
        self.norm = K1 * (1 - B + B * lengths / max(float(lengths.sum()) / max(len(texts), 1), 1.0))

    def best(self, query: str, count: int) -> list[int]:
        """The numbers of the texts with the highest scores above 0."""
        scores = np.zeros(len(self.norm))
        for word in sorted(set(_words(query))):
            if word in self.postings:
                numbers, counts = self.postings[word]
                rarity = np.log1p((len(scores) - len(numbers) + 0.5) / (len(numbers) + 0.5))
                scores[numbers] += rarity * counts * (K1 + 1) / (counts + self.norm[numbers])
        order = np.argsort(-scores, kind="stable")[:count]
        return [int(number) for number in order if scores[number] > 0]


def _words(text: str) -> list[str]:
    return _WORD.findall(normal(text).casefold())


class Consultation:
    """A request whose model may look things up before it answers; `made` holds its lookups."""

    def __init__(self, table: LookupTable, request: ChatRequest) -> None:
        self.table, self.made = table, list[dict[str, Any]]()
        table.counts["questions"] += 1
        self.request = replace(request, extra={**request.extra, "tools": [table.tool]})

    def follow(self, response: ChatResponse) -> ChatRequest | None:
        """The request that answers the lookups of a reply; None if it makes none, or too many."""
        calls = [c for c in response.message.get("tool_calls") or () if isinstance(c, Mapping)]
        if not calls or len(self.made) >= CALLS:
            return None
        reply = {"role": "assistant", "content": response.text or "", "tool_calls": calls}
        messages = [*self.request.messages, reply]
        for call in calls:
            content = self._answer(call.get("function"))
            messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": content})
        extra = dict(self.request.extra)
        if len(self.made) >= CALLS:
            extra["tool_choice"] = "none"
        self.request = replace(self.request, messages=messages, extra=extra)
        return self.request

    def _answer(self, function: object) -> str:
        """What the model reads about one call; an error is a text that it can react to."""
        if len(self.made) >= CALLS:
            return f"error: at most {CALLS} lookups"
        self.table.counts["lookups"] += 1
        query = _query(function)
        if query is None:
            self.made.append({"query": None, "keys": []})
            return f'error: expected {NAME} with arguments {{"query": "…"}}'
        hits = self.table.search(query)
        self.made.append({"query": query, "keys": [key for key, _ in hits]})
        rows = [{"key": key, "text": text[:CHARACTERS]} for key, text in hits]
        return json.dumps(rows, ensure_ascii=False)


def _query(function: object) -> str | None:
    if not isinstance(function, Mapping) or function.get("name") != NAME:
        return None
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    query = read.get("query") if isinstance(read, Mapping) else None
    return query if isinstance(query, str) else None
