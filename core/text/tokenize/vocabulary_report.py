"""Metrics of tokenizers on documents, by language, and the share of the vocabulary that is used.

bytes per token: UTF-8 bytes of text / tokens. fertility: tokens / words, where a word is a run of
characters without white space (so scripts without spaces have few words and a high fertility).
broken: the share of tokens without a whole character: single bytes of a longer character,
byte-fallback and unknown tokens. unused: the share of the vocabulary, without special tokens, that
no document uses. All tokenizers are measured on the same documents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.bpe_patterns import pre_tokenizer_chain
from sabia.core.text.tokenize.bpe_tables import byte_of_character
from sabia.core.text.tokenize.token_counts import add_to, sums_by_name
from sabia.core.text.tokenize.training_sample import sampled_batches

if TYPE_CHECKING:
    from sabia.core.text.tokenize.encoders import Encoder
    from sabia.core.text.tokenize.tokenizer import Tokenizer

REPORT_BYTES = 100_000_000
WORD = r"\S+"
MOST_LANGUAGES = 12  # shown in the table; all are in the file
COLUMNS = ("bytes_per_token", "fertility", "broken_share")


class VocabularyUsage:
    """Counts of one tokenizer: uses of each id; documents, bytes, words, tokens, broken tokens by
    language."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.broken = encoder, broken_tokens(encoder.tokenizer)
        self.used = np.zeros(len(self.broken), np.int64)
        self.by_language: dict[str, list[int]] = {}

    def figures(self) -> dict[str, object]:
        """The report of this tokenizer."""
        special = list(self.encoder.tokenizer.special_ids)
        ordinary = len(self.used) - len(special)
        used = int((self.used > 0).sum() - (self.used[special] > 0).sum())
        total = [sum(column) for column in zip(*self.by_language.values(), strict=True)]
        return {
            "vocab_size": len(self.used),
            "fingerprint": self.encoder.tokenizer.fingerprint,
            "unused_share": round(1 - used / max(ordinary, 1), 6),
            "all": _ratios(total or [0] * 5),
            "languages": {name: _ratios(row) for name, row in sorted(self.by_language.items())},
        }


def measure(encoders: Sequence[Encoder], sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The report of each tokenizer on the same sample of at most REPORT_BYTES."""
    usages = [VocabularyUsage(encoder) for encoder in encoders]
    columns = ["text", "language", "source"]
    for batch in sampled_batches(sources, REPORT_BYTES, columns):
        batch, encoded = _encoded(encoders, batch)
        texts = batch.column("text")
        words = pc.count_substring_regex(texts, WORD).to_numpy()
        sizes = pc.binary_length(texts).to_numpy()
        for usage, (ids, lengths) in zip(usages, encoded, strict=True):
            usage.used += np.bincount(ids, minlength=len(usage.used))
            ends = np.concatenate([[0], np.cumsum(usage.broken[ids])])
            bounds = np.concatenate([[0], np.cumsum(lengths)])
            broken = np.diff(ends[bounds])
            figures = (np.ones_like(sizes), sizes, words, lengths, broken)
            for name, sums in sums_by_name(batch.column("language"), *figures):
                add_to(usage.by_language.setdefault(name or "unknown", [0] * 5), sums)
    return [usage.figures() for usage in usages]


def _encoded(
    encoders: Sequence[Encoder], batch: pa.RecordBatch
) -> tuple[pa.RecordBatch, list[tuple[np.ndarray, np.ndarray]]]:
    """The documents on which no tokenizer gives up (tokenizing rejects the others), and their ids
    and lengths by each encoder."""
    kept = np.ones(batch.num_rows, bool)

    def refuse(row: int, _reason: str) -> None:
        kept[row] = False

    encoded = [encoder.encode_each(batch.column("text"), -1, refuse) for encoder in encoders]
    if kept.all():
        return batch, encoded
    batch = batch.filter(pa.array(kept))
    return batch, [encoder.encode(batch.column("text")) for encoder in encoders]


def write_report(target: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the reports as JSON to a file, or to stderr for `-`; note a table."""
    for line in table(figures):
        notes.note(line)
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    sys.stderr.write(text) if target == "-" else write_atomic(target, text)


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines of the table: each tokenizer on all documents, then by language."""
    lines = [
        "tokenizer, language: bytes per token, tokens per word, tokens without a whole character"
    ]
    for name, one in figures.items():
        lines.append(
            f"{name}: {one['vocab_size']:,} tokens, {one['unused_share']:.1%} unused; "
            + _line(one["all"])
        )
        languages = sorted(one["languages"].items(), key=lambda item: -item[1]["bytes"])
        lines += [f"  {code}: {_line(row)}" for code, row in languages[:MOST_LANGUAGES]]
    return lines


def broken_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """bool[V]: tokens that hold no whole character."""
    definition = json.loads(tokenizer.definition)
    byte_level = pre_tokenizer_chain(definition)[-1].get("type") == "ByteLevel"
    unknown = definition["model"].get("unk_token")
    characters = byte_of_character()
    broken = np.zeros(tokenizer.vocab_size, bool)
    for token, number in tokenizer.backend.get_vocab(with_added_tokens=False).items():
        if byte_level and all(c in characters for c in token):
            raw = bytes(characters[c] for c in token)
            broken[number] = not raw.decode("utf-8", "ignore")
        else:
            fallback = token.startswith("<0x") and token.endswith(">") and len(token) == 6
            broken[number] = token == unknown or fallback
    broken[list(tokenizer.special_ids)] = False
    if (unk := definition["model"].get("unk_id")) is not None:
        broken[unk] = True
    return broken


def _ratios(row: Sequence[int]) -> dict[str, float]:
    documents, size, words, tokens, broken = row
    return {
        "documents": documents,
        "bytes": size,
        "words": words,
        "tokens": tokens,
        "bytes_per_token": round(size / max(tokens, 1), 4),
        "fertility": round(tokens / max(words, 1), 4),
        "broken_share": round(broken / max(tokens, 1), 6),
    }


def _line(row: Mapping[str, float]) -> str:
    return "{:.2f} bytes, {:.2f} tokens, {:.2%}".format(*(row[name] for name in COLUMNS))
