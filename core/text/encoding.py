"""Documents to ids by the fastest engine that agrees with the tokenizer on the user's own text.

tiktoken encodes two to five times as fast as tokenizers, but has its own reading of a vocabulary:
it merges whatever pair is a token, in the order of ids. It is taken only where the tokenizer is a
plain byte-level BPE whose ids are in the order of its merges, and where both give the same ids on
a probe of the first documents. The choice depends on tokenizer and documents alone, not on timing,
so a re-run makes the same rows. Special tokens spelled out in a document stay ordinary text.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sabia.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from sabia.core.text.tokenizer import Tokenizer

ENGINES = ("auto", "tiktoken", "tokenizers")
PROBE_DOCUMENTS = 1_000
PROBE_CHARS = 1_000_000
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# tiktoken's regular expressions run out of stack on very long runs of white space
LONG_SPACE = re.compile(r"\s{2000}")


@dataclass(frozen=True)
class Encoder:
    """Encodes batches of documents with one engine; picklable."""

    tokenizer: Tokenizer
    engine: str  # tiktoken or tokenizers

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, without end-of-document tokens."""
        import numpy as np

        if self.engine == "tokenizers":
            rows = self.tokenizer.encode_ordinary_batch(texts)
            return [np.asarray(row, np.int32) for row in rows]
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> np.ndarray:
        import numpy as np

        if LONG_SPACE.search(text):
            return np.asarray(self.tokenizer.encode_ordinary(text), np.int32)
        return self._tiktoken.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    @cached_property
    def _tiktoken(self) -> Any:
        return tiktoken_encoding(self.tokenizer)


@dataclass(frozen=True)
class Choice:
    """The engine chosen, and a line that says why."""

    encoder: Encoder
    reason: str


def choose_encoder(tokenizer: Tokenizer, texts: Sequence[str], engine: str = "auto") -> Choice:
    """Takes tiktoken if it gives the ids of tokenizers on all `texts`, else tokenizers.

    Raises UsageError where `engine` is tiktoken and it cannot be used.
    """
    plain, fast = Encoder(tokenizer, "tokenizers"), Encoder(tokenizer, "tiktoken")
    if engine == "tokenizers":
        return Choice(plain, "tokenizers, as asked")
    if tiktoken_encoding(tokenizer) is None:
        return _only_plain(plain, engine, "tiktoken cannot express this tokenizer")
    wanted, plain_mb_s = _timed(plain, texts)
    found, fast_mb_s = _timed(fast, texts)
    differing = sum(a.tolist() != b.tolist() for a, b in zip(wanted, found, strict=True))
    if differing:
        reason = f"tiktoken differs on {differing} of {len(texts)} probed documents"
        return _only_plain(plain, engine, reason)
    speeds = f"{fast_mb_s:.1f} MB/s, tokenizers {plain_mb_s:.1f}"
    return Choice(fast, f"tiktoken: same ids on {len(texts)} probed documents ({speeds})")


def probe_texts(batches: Iterable[Any]) -> list[str]:
    """The first documents of batches with a `text` column, within the limits of a probe."""
    texts: list[str] = []
    chars = 0
    for batch in batches:
        for text in batch.column("text").to_pylist():
            texts.append(text)
            chars += len(text)
            if len(texts) >= PROBE_DOCUMENTS or chars >= PROBE_CHARS:
                return texts
    return texts


def tiktoken_encoding(tokenizer: Tokenizer) -> Any:
    """The vocabulary as a tiktoken.Encoding with the same ids; None where it has no such form."""
    definition = json.loads(tokenizer.definition)
    pattern = _split_pattern(definition)
    ranks = _ranks(definition)
    if pattern is None or ranks is None:
        return None
    import tiktoken

    try:
        return tiktoken.Encoding("sabia", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError:  # a pattern that its regular expressions do not know
        return None


def _only_plain(plain: Encoder, engine: str, reason: str) -> Choice:
    if engine == "tiktoken":
        raise UsageError(f"--encoder tiktoken: {reason}; use auto or tokenizers")
    return Choice(plain, f"tokenizers: {reason}")


def _timed(encoder: Encoder, texts: Sequence[str]) -> tuple[list[np.ndarray], float]:
    encoder.encode(texts[:1])  # building the engine is not its speed
    start = time.process_time()
    rows = encoder.encode(texts)
    seconds = max(time.process_time() - start, 1e-9)
    return rows, sum(len(text.encode()) for text in texts) / 1e6 / seconds


def _split_pattern(definition: dict[str, Any]) -> str | None:
    """The regular expression of a byte-level pre-tokenizer; None for any other kind."""
    if definition.get("normalizer"):
        return None
    steps = definition.get("pre_tokenizer") or {}
    chain = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    last = chain[-1] if chain else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(chain) == 1:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    split = chain[0]
    whole = split.get("type") == "Split" and split.get("behavior") == "Isolated"
    plain = whole and not split.get("invert") and not last.get("use_regex", True)
    return split["pattern"].get("Regex") if len(chain) == 2 and plain else None


def _ranks(definition: dict[str, Any]) -> dict[bytes, int] | None:
    """bytes → id of all ordinary tokens, where ids are in the order of the merges; else None."""
    model = definition["model"]
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or model.get("byte_fallback") or any(map(model.get, odd)):
        return None
    vocab: dict[str, int] = model["vocab"]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    made = [vocab.get(left + right, -1) for left, right in pairs]
    added = {token["content"] for token in definition["added_tokens"]}
    table = byte_of_character()
    tokens = [token for token in vocab if token not in added]
    if any(character not in table for token in tokens for character in token):
        return None
    single = [vocab.get(character, -1) for character in table]
    first = made[0] if made else len(vocab)
    if any(b <= a for a, b in itertools.pairwise(made)) or min(single) < 0:
        return None
    if max(single) > first or len(tokens) != len(single) + len(made):
        return None
    return {bytes(table[c] for c in token): vocab[token] for token in tokens}


def byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: a printable one as itself, else the next character from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + i): byte for i, byte in enumerate(others)}
