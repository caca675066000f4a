"""Extended vocabularies keep every old id; reports count what a slow count gives."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.options.tokenize import TokenizerTraining
from sabia.core.shards.inputs import from_path
from sabia.core.text.tokenize.bpe_encoder import KernelEncoder
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train
from sabia.core.text.tokenize.training_sample import even_split, sampled_batches
from sabia.core.text.tokenize.vocabulary_extension import (
    Extension,
    extend,
    grown_rows,
    load_extension,
)
from sabia.core.text.tokenize.vocabulary_report import broken_tokens, measure

EN = [f"the quick brown fox number {i} jumps over the lazy dog again and again" for i in range(90)]
PT = [f"a rápida raposa marrom número {i} pula sobre o cachorro preguiçoso" for i in range(90)]


@pytest.fixture(scope="module", params=["bpe", "bpe-fallback"])
def grown(request):
    base = train(EN, TokenizerTraining(vocab_size=420, model=request.param))
    return base, *extend(base, PT, base.vocab_size + 28)


def test_old_ids_stay_and_text_gets_shorter(grown):
    base, tokenizer, extension = grown
    size = base.vocab_size
    assert tokenizer.vocab_size == size + len(extension.pieces) == size + 28
    for number in range(size):
        assert tokenizer.backend.id_to_token(number) == base.backend.id_to_token(number)
    for text in [*EN[:5], *PT[:5], "<|im_start|>user 漢字\n"]:
        old, new = base.encode(text), tokenizer.encode(text)
        assert tokenizer.decode(old) == tokenizer.decode(new) == base.decode(old)
        assert len(new) <= len(old)
        spelled = [extension.pieces[i - size] if i >= size else (i,) for i in new]
        assert list(itertools.chain(*spelled)) == old  # new tokens stand for runs of old ones
    assert len(tokenizer.encode(PT[3])) < 0.8 * len(base.encode(PT[3]))


def test_merges_are_those_of_a_plain_count(grown):
    """The definition of BPE on whole words, counted anew for every merge."""
    base, tokenizer, extension = grown
    counts = Counter()
    for text in PT:
        normal = base.backend.normalizer.normalize_str(text) if base.backend.normalizer else text
        for word, _ in base.backend.pre_tokenizer.pre_tokenize_str(normal):
            counts[tuple(t.value for t in base.backend.model.tokenize(word))] += 1
    words = [(list(word), n) for word, n in counts.items()]
    known, learnt = set(base.backend.get_vocab()), []
    for _ in range(25):
        pairs = Counter()
        for word, n in words:
            for pair in itertools.pairwise(word):
                pairs[pair] += n
        fine = {p: n for p, n in pairs.items()
                if "".join(p) not in known and not any(t.startswith("<0x") for t in p)}  # fmt: skip
        best = min(fine, key=lambda p: (-fine[p], p))
        known.add("".join(best))
        learnt.append("".join(best))
        for word, _ in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    first = base.vocab_size
    assert [tokenizer.backend.id_to_token(first + i) for i in range(25)] == learnt
    assert len(extension.pieces) == 28


def test_embeddings_grow_by_means(grown, tmp_path):
    base, tokenizer, extension = grown
    tokenizer.save(tmp_path)
    assert load_extension(tmp_path) is None
    extension.save(tmp_path)
    assert load_extension(tmp_path) == extension
    rows = np.random.default_rng(0).normal(size=(base.vocab_size + 5, 3)).astype(np.float32)
    made = grown_rows(rows, extension)
    assert made.shape == (tokenizer.vocab_size, 3)
    assert np.array_equal(made[: base.vocab_size], rows[: base.vocab_size])
    np.testing.assert_allclose(made[-1], rows[list(extension.pieces[-1])].mean(0), rtol=1e-5)
    with pytest.raises(UsageError, match="expected at least"):
        grown_rows(rows[:9], extension)
    (tmp_path / "extension.json").write_text("{}")
    with pytest.raises(BadData, match=r"extension\.json"):
        load_extension(tmp_path)


def test_added_tokens_outside_the_model_keep_their_ids():
    """As in Llama-3: added tokens count from the size of the model's vocabulary."""
    base = train(EN, TokenizerTraining(vocab_size=400))
    definition = json.loads(base.definition)
    definition["added_tokens"].append(
        {"id": 400, "content": "<|tail|>", "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
    )
    tail = Tokenizer(json.dumps(definition), base.config)
    number = tail.token_id("<|tail|>")
    longer, extension = extend(tail, PT, tail.vocab_size + 10)
    assert longer.token_id("<|tail|>") == number and extension.base_size == tail.vocab_size
    assert longer.encode("a<|tail|>b") == tail.encode("a<|tail|>b")
    texts = pa.array(PT)
    ids, _ = KernelEncoder(longer).encode(texts)
    assert ids.tolist() == [i for row in longer.encode_ordinary_batch(PT) for i in row]


def test_what_cannot_be_extended_is_refused():
    base = train(EN, TokenizerTraining(vocab_size=400))
    with pytest.raises(UsageError, match="expected more than the"):
        extend(base, PT, 300)
    definition = json.loads(base.definition)
    definition["pre_tokenizer"] = None
    with pytest.raises(UsageError, match="not a BPE tokenizer that splits"):
        extend(Tokenizer(json.dumps(definition), base.config), PT, 500)
    assert Extension(1, "x", ()).pieces == ()


def sources(tmp_path, rows):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    return from_path(str(tmp_path / "d.parquet"), "document")


def test_report_counts_what_a_slow_count_gives(tmp_path):
    tokenizer = train(EN, TokenizerTraining(vocab_size=420))
    rows = [
        {"text": t, "language": code} for code, texts in (("en", EN), ("pt", PT)) for t in texts
    ]
    rows.append({"text": "漢字", "language": None})
    plain = Encoder(tokenizer, "tokenizers")
    (report,) = measure([plain], sources(tmp_path, rows))
    used = set()
    for code, texts in (("en", EN), ("pt", PT), ("unknown", ["漢字"])):
        ids = [i for t in texts for i in tokenizer.encode_ordinary(t)]
        used |= set(ids)
        row, size = report["languages"][code], sum(len(t.encode()) for t in texts)
        words = sum(len(t.split()) for t in texts)
        assert (row["tokens"], row["bytes"], row["words"]) == (len(ids), size, words)
        assert row["bytes_per_token"] == pytest.approx(size / len(ids), abs=1e-4)
        assert row["fertility"] == pytest.approx(len(ids) / words, abs=1e-4)
    assert report["languages"]["unknown"]["broken_share"] == 1.0
    ordinary = tokenizer.vocab_size - len(tokenizer.special_ids)
    assert report["unused_share"] == pytest.approx(1 - len(used) / ordinary, abs=1e-5)
    assert broken_tokens(tokenizer)[tokenizer.encode_ordinary("漢")].all()
    assert not broken_tokens(tokenizer)[tokenizer.encode_ordinary("the")].any()


def test_byte_fallback_counts_as_broken():
    tokenizer = train(EN, TokenizerTraining(vocab_size=500, model="bpe-fallback"))
    assert broken_tokens(tokenizer)[tokenizer.encode_ordinary("漢")].sum() == 3


def test_a_sample_is_fair_to_sources_and_bounded(tmp_path):
    draw = random.Random(0)
    rows = [{"text": "x" * draw.randint(50, 150), "source": draw.choice(["big"] * 8 + ["small"])}
            for _ in range(4000)]  # fmt: skip
    given = sources(tmp_path, rows)
    batches = list(sampled_batches(given, 60_000, ["text", "source"]))
    taken = Counter()
    for batch in batches:
        for row in batch.to_pylist():
            taken[row["source"]] += len(row["text"])
    assert sum(taken.values()) == pytest.approx(60_000, rel=0.01)
    assert taken["small"] == pytest.approx(30_000, rel=0.02)
    again = list(sampled_batches(given, 60_000, ["text", "source"]))
    assert all(a.equals(b) for a, b in zip(batches, again, strict=True))
    whole = sum(b.num_rows for b in sampled_batches(given, 10**9, ["text", "source"]))
    assert whole == 4000
    assert even_split({"a": 5, "b": 100, "c": 100}, 65) == {"a": 5, "b": 30, "c": 30}
