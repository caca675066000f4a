"""Documents on which a tokenizer's regular expression gives up, and engines chosen on the way."""

import random

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sabia.core.shards.dry_run import NoRejects
from sabia.core.shards.inputs import from_path
from sabia.core.shards.mapping import ShardContext
from sabia.core.text.tokenize import encoders
from sabia.core.text.tokenize.document_encoding import encode_shard, tokens_of
from sabia.core.text.tokenize.encoders import DeferredEncoder, Encoder, choose_encoder
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.vocabulary_report import measure

PANICS = "x" * 40  # (x+x+)+y backtracks for ever on it


def tokenizer(pattern: str) -> Tokenizer:
    """Bytes as tokens, and an end of documents."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate([*alphabet, "<end>"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend.to_str(), {"eos_token": "<end>"})


@pytest.mark.parametrize("bad", [(3,), (0, 7), (), tuple(range(8))])
def test_a_panic_costs_one_document(bad: tuple[int, ...], capfd) -> None:
    texts = [PANICS if n in bad else f"document {n} of the batch" for n in range(8)]
    batch = pa.RecordBatch.from_pydict(
        {
            "id": [str(n) for n in range(8)],
            "text": texts,
            "source": ["s"] * 8,
            "language": ["en"] * 8,
        },
    )
    refused: list[tuple[list[str], str]] = []
    context = ShardContext(0, "shard", NoRejects(""))
    context.reject = lambda rows, why: refused.append((rows["text"].to_pylist(), why))
    given = tokenizer(r"(?:x+x+)+y|\s+|\S+?")
    (made,) = encode_shard(iter([batch]), context, Encoder(given, "tokenizers"))
    tokens, lengths = tokens_of(made)
    kept = [text for text in texts if text != PANICS]
    assert lengths.tolist() == [len(text) + 1 for text in kept]
    assert len(tokens) == lengths.sum()
    assert [rows for rows, _ in refused] == [[PANICS]] * len(bad)
    assert all("gave up on it (Onig" in why for _, why in refused)


def test_a_panic_in_the_probe_does_not_end_the_choice(capfd) -> None:
    given = tokenizer(r"(?:x+x+)+y|\s+|\S+?")
    choice = choose_encoder(given, ["some words", PANICS, "more"], "auto")
    assert choice.encoder.encode(pa.array(["some"]))[0].tolist() == given.encode_ordinary("some")


def test_other_errors_are_not_taken_for_panics() -> None:
    encoder = Encoder(tokenizer(r"\s+"), "tokenizers")
    with pytest.raises(AttributeError):
        encoder.encode_each(["no array"], -1, lambda row, why: None)  # type: ignore[arg-type]


def test_documents_that_arrive_are_encoded_by_the_engine_chosen_for_them(monkeypatch) -> None:
    monkeypatch.setattr(encoders, "PROBE_DOCUMENTS", 100)
    given = tokenizer(r"\s+|\w+|[^\s\w]+")
    deferred, plain = DeferredEncoder(given, "auto"), Encoder(given, "tokenizers")
    choice = random.Random(1)
    for number in range(8):
        texts = pa.array([" ".join(choice.choices(["a", "bé", "c!", "\n"], k=choice.randrange(9)))
                          for _ in range(30)])  # fmt: skip
        for one, other in zip(deferred.encode(texts, 5), plain.encode(texts, 5), strict=True):
            assert np.array_equal(one, other)
        assert len(deferred.chosen) == (number > 3)


def test_the_report_leaves_out_what_the_tokenizer_gives_up_on(tmp_path, capfd) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in ("one", PANICS, "two")))
    encoder = Encoder(tokenizer(r"(?:x+x+)+y|\s+|\S+?"), "tokenizers")
    (figures,) = measure([encoder], from_path(str(path), "document"))
    assert figures["all"]["documents"] == 2 and figures["all"]["tokens"] == 6
