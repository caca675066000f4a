"""Encode documents with the fastest engine that gives the same ids as the library `tokenizers`.

Three engines: `kernel`, our compiled encoder with a cache of pre-tokens (bpe_encoder), the fastest
by far, which supports the common kinds of BPE; `tiktoken`, two to five times as fast as
`tokenizers` for byte-level BPE whose ids are in the order of its merges; and `tokenizers`, the
reference. `auto` takes the first engine that supports the tokenizer and gives the same ids on a
probe, the first documents; the kernel only where the probe is full, as loading it takes longer than
encoding a small input, and, while it is not compiled on this machine, only where the others would
take longer than compiling it. Special tokens written in a document stay ordinary text. A regular
expression that gives up on a text (it would backtrack too long) is a panic of these libraries,
which costs one document.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.text.tokenize.bpe_patterns import Unsupported, byte_level_pattern
from sabia.core.text.tokenize.bpe_tables import byte_of_character
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.runtime.cache_folder import has_compiled
from sabia.kernels.runtime.dispatch import numba_available
from sabia.kernels.runtime.first_runs import compile_seconds

if TYPE_CHECKING:
    from sabia.core.text.tokenize.bpe_encoder import KernelEncoder

PROBE_DOCUMENTS = 1_000
PROBE_CHARS = 1_000_000
# tiktoken's regular expressions overflow the stack on very long runs of white space
LONG_SPACE = re.compile(r"\s{2000}")


@dataclass(frozen=True)
class Encoder:
    """Encodes batches of documents with one engine; picklable."""

    tokenizer: Tokenizer
    engine: str  # kernel, tiktoken or tokenizers

    def encode(self, texts: pa.Array, end_id: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[Σ n], lengths int64[documents]) of a string array without nulls.

        `end_id` >= 0 is appended to every document and counted in its length.
        """
        if self.engine == "kernel":
            return self._kernel.encode(texts, end_id)
        encode = self.tokenizer.encode_ordinary_batch
        rows = (encode if self.engine == "tokenizers" else self._tiktoken_batch)(texts.to_pylist())
        end = np.array([end_id] if end_id >= 0 else [], np.int32)
        lengths = np.array([len(row) + len(end) for row in rows], np.int64)
        pieces = [part for row in rows for part in (np.asarray(row, np.int32), end)]
        return (np.concatenate(pieces) if pieces else end[:0]), lengths

    def prepare(self) -> None:
        """Build the engine before the first call; raises Unsupported."""
        if self.engine == "kernel":
            self._kernel.encode(pa.array(["a"]))
        elif self.engine == "tiktoken" and self._tiktoken is None:
            raise Unsupported("cannot express this tokenizer")

    def encode_each(
        self, texts: pa.Array, end_id: int, refuse: Callable[[int, str], None]
    ) -> tuple[np.ndarray, np.ndarray]:
        """`encode` of the documents on which the library does not panic; refuse(row, reason) gets
        the others."""
        try:
            return self.encode(texts, end_id)
        except BaseException as error:
            if not _is_panic(error):
                raise
        encoded = []
        for row in range(len(texts)):
            stop.check()
            try:
                encoded.append(self.encode(texts.slice(row, 1), end_id))
            except BaseException as error:
                if not _is_panic(error):
                    raise
                refuse(row, f"the tokenizer gave up on it ({str(error)[:100]})")
        parts = zip(*encoded, strict=True) if encoded else ([np.empty(0, np.int64)],) * 2
        ids, lengths = (np.concatenate(part) for part in parts)
        return ids.astype(np.int32), lengths

    def _tiktoken_batch(self, texts: Sequence[str]) -> list[Any]:
        return [
            self.tokenizer.encode_ordinary(text)
            if LONG_SPACE.search(text)
            else self._tiktoken_encode(text)
            for text in texts
        ]

    def _tiktoken_encode(self, text: str) -> Any:
        try:
            return self._tiktoken.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            if not _is_panic(error):
                raise
            return self.tokenizer.encode_ordinary(text)

    @cached_property
    def _tiktoken(self) -> Any:
        return tiktoken_encoding(self.tokenizer)

    @cached_property
    def _kernel(self) -> KernelEncoder:
        from sabia.core.text.tokenize.bpe_encoder import KernelEncoder

        return KernelEncoder(self.tokenizer)

    def __getstate__(self) -> dict[str, object]:
        return {"tokenizer": self.tokenizer, "engine": self.engine}


@dataclass(frozen=True)
class EncoderChoice:
    """The encoder chosen, and the reason in one line."""

    encoder: Encoder
    reason: str


@dataclass(frozen=True)
class DeferredEncoder(Encoder):
    """Encodes documents that arrive one after the other: with `tokenizers` until they fill a probe,
    then with the engine that is chosen by them. The ids are the same with all engines.

    Raises UsageError where the requested engine cannot be used, or differs on the probe.
    """

    seen: list[str] = field(default_factory=list)
    chosen: list[Encoder] = field(default_factory=list)  # one, once the probe is full

    def __post_init__(self) -> None:
        if self.engine != "auto":
            choose_encoder(self.tokenizer, [], self.engine)

    def encode(self, texts: pa.Array, end_id: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """See Encoder."""
        if not self.chosen and _is_full(self.seen):
            choice = choose_encoder(self.tokenizer, self.seen, self.engine)
            notes.note(f"encoder {choice.reason}")
            self.chosen.append(choice.encoder)
        if self.chosen:
            return self.chosen[0].encode(texts, end_id)
        self.seen.extend(probe_texts([{"text": texts}]))
        return Encoder(self.tokenizer, "tokenizers").encode(texts, end_id)


def choose_encoder(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    engine: str = "auto",
    total: Callable[[], int | None] = lambda: None,
) -> EncoderChoice:
    """The fastest engine that gives the ids of `tokenizers` on all `texts`, or the one requested.

    total: the bytes of all documents, where they are known. Raises UsageError where the requested
    engine cannot be used.
    """
    plain = Encoder(tokenizer, "tokenizers")
    if engine == "tokenizers":
        return EncoderChoice(plain, "tokenizers, as requested")
    probe = _Probe(plain, texts)
    wanted = [engine]
    if engine == "auto":
        wanted = ["tiktoken"]
        if _is_full(texts) and numba_available():
            if not has_compiled("bpe") and (size := total()) is not None:
                _, speed = probe.test(Encoder(tokenizer, "tiktoken"))
                first = "tiktoken" if speed > probe.plain_speed else "tokenizers"
                if size / 1e6 / max(speed, probe.plain_speed) < compile_seconds("bpe"):
                    reason = f"{first}: faster here than to compile the kernel, with the same ids"
                    return EncoderChoice(Encoder(tokenizer, first), reason)
            wanted = ["kernel", "tiktoken"]
    refusals = []
    for name in wanted:
        encoder = Encoder(tokenizer, name)
        refusal, speed = probe.test(encoder)
        if not refusal:
            speeds = f"{speed:.1f} MB/s, tokenizers {probe.plain_speed:.1f}"
            reason = f"{name}: same ids on {len(texts)} probed documents ({speeds})"
            return EncoderChoice(encoder, reason)
        refusals.append(f"{name} {refusal}")
    if engine != "auto":
        raise UsageError(f"--encoder {engine}: {refusals[0]}; use auto or tokenizers")
    return EncoderChoice(plain, f"tokenizers: {'; '.join(refusals)}")


@dataclass(frozen=True)
class _Probe:
    """The first documents, and the ids that `tokenizers` gives for them."""

    plain: Encoder
    texts: Sequence[str]

    @property
    def plain_speed(self) -> float:
        """Megabytes per CPU second of `tokenizers`."""
        return float(self._reference[1][1])

    def test(self, encoder: Encoder) -> tuple[str, float]:
        """(why the encoder cannot be used or "", its megabytes per CPU second, else 0)."""
        try:
            encoder.prepare()
        except Unsupported as error:
            return f"cannot: {error}" if encoder.engine == "kernel" else str(error), 0.0
        texts, (expected, _) = self._reference
        actual, mb_s = _timed(encoder, texts)
        differing = _differing(expected, actual)
        if differing:
            return f"differs on {differing} of {len(texts)} probed documents", 0.0
        return "", mb_s

    @cached_property
    def _reference(self) -> tuple[Sequence[str], Any]:
        """The texts on which `tokenizers` does not panic, and `_timed` of them."""
        try:
            return self.texts, _timed(self.plain, self.texts)
        except BaseException as error:
            if not _is_panic(error):
                raise
        refused: list[int] = []
        self.plain.encode_each(pa.array(self.texts), -1, lambda row, _: refused.append(row))
        texts = [text for row, text in enumerate(self.texts) if row not in refused]
        return texts, _timed(self.plain, texts)


def probe_texts(batches: Iterable[Any]) -> list[str]:
    """The first documents of batches with a `text` column, within the limits of a probe."""
    texts: list[str] = []
    chars = 0
    for batch in batches:
        for text in batch["text"].to_pylist():
            texts.append(text)
            chars += len(text)
            if len(texts) >= PROBE_DOCUMENTS or chars >= PROBE_CHARS:
                return texts
    return texts


def tiktoken_encoding(tokenizer: Tokenizer) -> Any:
    """The vocabulary as a tiktoken.Encoding with the same ids; None where that is impossible."""
    definition = json.loads(tokenizer.definition)
    try:
        pattern, steps = byte_level_pattern(definition)
    except Unsupported:
        return None
    ranks = _ranks(definition)
    if steps or definition.get("normalizer") or ranks is None:
        return None
    import tiktoken

    try:
        return tiktoken.Encoding("sabia", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError:  # a pattern that its regular expressions do not know
        return None


def _is_panic(error: BaseException) -> bool:
    """A panic of a library in Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _is_full(texts: Sequence[str]) -> bool:
    return len(texts) >= PROBE_DOCUMENTS or sum(map(len, texts)) >= PROBE_CHARS


def _timed(encoder: Encoder, texts: Sequence[str]) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """(the result of `encode`, megabytes per CPU second)."""
    column = pa.array(texts, pa.string())
    start = time.process_time()
    encoded = encoder.encode(column)
    seconds = max(time.process_time() - start, 1e-9)
    return encoded, sum(len(text.encode()) for text in texts) / 1e6 / seconds


def _differing(
    expected: tuple[np.ndarray, np.ndarray], actual: tuple[np.ndarray, np.ndarray]
) -> int:
    """How many documents have different ids."""
    rows = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (expected, actual)]
    return sum(not np.array_equal(a, b) for a, b in zip(*rows, strict=True))


def _ranks(definition: dict[str, Any]) -> dict[bytes, int] | None:
    """bytes → id of all ordinary tokens, where ids are in the order of the merges; else None."""
    model = definition["model"]
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or model.get("byte_fallback") or any(map(model.get, odd)):
        return None
    vocab: dict[str, int] = model["vocab"]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    merged = [vocab.get(left + right, -1) for left, right in pairs]
    added = {token["content"] for token in definition["added_tokens"]}
    table = byte_of_character()
    tokens = [token for token in vocab if token not in added]
    if any(character not in table for token in tokens for character in token):
        return None
    single = [vocab.get(character, -1) for character in table]
    first = merged[0] if merged else len(vocab)
    if any(b <= a for a, b in itertools.pairwise(merged)) or min(single) < 0:
        return None
    if max(single) > first or len(tokens) != len(single) + len(merged):
        return None
    return {bytes(table[c] for c in token): vocab[token] for token in tokens}
