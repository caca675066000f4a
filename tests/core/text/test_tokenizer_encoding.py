"""The fast encoder: taken only where it gives the ids of tokenizers, and safe on hard texts."""

import json
import pickle
from functools import cache

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.errors import UsageError
from sabia.core.text.tokenize import encoders
from sabia.core.text.tokenize.encoders import Encoder, choose_encoder, tiktoken_encoding
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

TEXTS = [
    f"Número {i}: the {word} of {i * 37} — não é “difícil”, it's {word}ly done.\n\n\tFim {i}.  "
    for i in range(60)
    for word in ("quick", "slow", "wild", "quiet")
]
HARD = [
    "", " ", "a" * 50_000, " " * 100_000 + "x", "\n" * 30_000, "x" + " \n" * 3_000 + "y",
    "<|endoftext|><|im_end|>", "漢字😀" * 200, "\u0000\u200b\ufeff", "1234567890" * 100,
]  # fmt: skip


def rows(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(pa.array(texts, pa.string()))
    assert ids.dtype == np.int32
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]


@cache
def trained() -> Tokenizer:
    return train_bpe(TEXTS, 700)


def changed(**changes) -> Tokenizer:
    definition = json.loads(trained().definition)
    definition.update(changes)
    return Tokenizer(json.dumps(definition), trained().config)


def test_tiktoken_is_taken_and_agrees_on_hard_texts():
    choice = choose_encoder(trained(), TEXTS)
    assert choice.encoder.engine == "tiktoken" and "240 probed documents" in choice.reason
    plain = Encoder(trained(), "tokenizers")
    for text in HARD:
        (ids,) = rows(choice.encoder, [text])
        assert [ids] == rows(plain, [text]) == [trained().encode_ordinary(text)]
        assert not set(ids) & trained().special_ids


def test_encoder_travels_to_worker_processes():
    encoder = choose_encoder(trained(), TEXTS).encoder
    again = pickle.loads(pickle.dumps(encoder))
    assert rows(again, HARD) == rows(encoder, HARD)


def test_a_disagreement_on_the_probe_keeps_tokenizers(monkeypatch):
    swapped = Encoder.encode

    def wrong(self, texts, end_id=-1):
        ids, lengths = swapped(self, texts, end_id)
        return (ids + 1 if self.engine == "tiktoken" else ids), lengths

    monkeypatch.setattr(Encoder, "encode", wrong)
    choice = choose_encoder(trained(), TEXTS)
    assert choice.encoder.engine == "tokenizers" and "differs on 240 of 240" in choice.reason
    with pytest.raises(UsageError, match="--encoder tiktoken: tiktoken differs"):
        choose_encoder(trained(), TEXTS, "tiktoken")


def test_what_tiktoken_cannot_express_is_not_tried():
    assert tiktoken_encoding(trained()) is not None
    assert tiktoken_encoding(changed(normalizer={"type": "NFC"})) is None
    assert tiktoken_encoding(changed(pre_tokenizer={"type": "Whitespace"})) is None
    model = json.loads(trained().definition)["model"]
    shuffled = {**model, "merges": model["merges"][::-1]}  # ids no longer in order of the merges
    assert tiktoken_encoding(changed(model=shuffled)) is None
    assert tiktoken_encoding(changed(model={**model, "byte_fallback": True})) is None
    choice = choose_encoder(changed(normalizer={"type": "NFC"}), TEXTS)
    assert choice.encoder.engine == "tokenizers" and "cannot express" in choice.reason


def test_gpt2_style_tokenizers_are_expressed():
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = changed(pre_tokenizer=gpt2)
    choice = choose_encoder(tokenizer, TEXTS)
    assert choice.encoder.engine == "tiktoken"
    assert rows(choice.encoder, HARD) == rows(Encoder(tokenizer, "tokenizers"), HARD)


@pytest.mark.parametrize("engine", ["kernel", "tiktoken", "tokenizers"])
def test_engines_end_documents_alike(engine):
    ids, lengths = Encoder(trained(), engine).encode(pa.array(HARD), end_id=0)
    ends = np.cumsum(lengths) - 1
    assert not ids[ends].any()
    pieces = [row[:-1].tolist() for row in np.split(ids, ends[:-1] + 1)]
    assert pieces == rows(Encoder(trained(), "tokenizers"), HARD)


def test_the_kernel_is_taken_where_there_is_enough_to_encode():
    choice = choose_encoder(trained(), TEXTS * 5)
    assert choice.encoder.engine == "kernel" and "same ids on 1200" in choice.reason
    assert choose_encoder(trained(), TEXTS, "kernel").encoder.engine == "kernel"
    lower = changed(normalizer={"type": "Lowercase"})
    assert (
        "kernel cannot: normalizer Lowercase; tiktoken" in choose_encoder(lower, TEXTS * 5).reason
    )
    with pytest.raises(UsageError, match="--encoder kernel: kernel cannot: normalizer Lowercase"):
        choose_encoder(lower, TEXTS, "kernel")


def test_a_kernel_that_is_not_compiled_is_taken_where_that_pays(monkeypatch):
    monkeypatch.setattr(encoders, "has_compiled", lambda kernel: False)
    monkeypatch.setattr(encoders, "compile_seconds", lambda kernel: 10.0)
    found = {}
    for size in (1_000_000, 10**12):
        found[size] = choose_encoder(trained(), TEXTS * 5, total=lambda size=size: size)
    assert [choice.encoder.engine for choice in found.values()] == ["tiktoken", "kernel"]
    assert "faster here than to compile" in found[1_000_000].reason
    assert rows(found[1_000_000].encoder, HARD) == rows(found[10**12].encoder, HARD)
    nfc = changed(normalizer={"type": "NFC"})  # tiktoken cannot express it
    choice = choose_encoder(nfc, TEXTS * 5, total=lambda: 1_000_000)
    assert choice.encoder.engine == "tokenizers"
    monkeypatch.setattr(encoders, "has_compiled", lambda kernel: True)
    assert choose_encoder(nfc, TEXTS * 5, total=lambda: 1).encoder.engine == "kernel"
