"""Tokenizers: round trips, digits, special tokens, determinism, and the ids of transformers."""

import json
import pickle
from functools import cache

import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.options.tokenize import TokenizerTraining
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import specials, train_bpe

TEXTS = [
    f"The sum of {a} and {b} is {a + b}. A soma de {a} e {b} é {a + b}; não é difícil."
    for a in range(12)
    for b in range(12)
]
HARD = [
    "",
    " ",
    "\n\n  \t x \r\n y   ",
    "37+58=095, 1.234.567,89 ½ ²",
    "don't WON'T l'été d'água",
    "漢字かな😀👩‍👩‍👧 é ﷺ \u0000 \u200b",
    "a" * 500,
    "<|endoftext|>", "<|im_start|>user", "<|endoftext",
]  # fmt: skip


@cache
def trained() -> Tokenizer:
    return train_bpe(TEXTS, 600)


@pytest.mark.parametrize("text", HARD)
def test_any_text_decodes_back(text):
    tokenizer = trained()
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_one_token():
    tokenizer = trained()
    assert len(tokenizer.encode("1234567890")) == 10
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    assert not [p for p in pieces if len(p) > 1 and any(c.isdigit() for c in p) and "<|" not in p]


def test_special_tokens_are_first_and_only_read_when_meant():
    tokenizer = trained()
    assert [tokenizer.token_id(token) for token in specials(TokenizerTraining())] == list(range(16))
    assert tokenizer.encode("<|im_end|>") == [3]
    spelled = tokenizer.encode_ordinary("<|im_end|>")
    assert len(spelled) > 1 and not tokenizer.special_ids & set(spelled)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (0, 1, None)
    assert tokenizer.stop_ids == (0, 3)


def test_batches_equal_single_texts():
    tokenizer = trained()
    ordinary = [tokenizer.encode_ordinary(text) for text in HARD]
    assert tokenizer.encode_ordinary_batch(HARD) == ordinary


def test_training_is_deterministic_and_bounded():
    again = train_bpe(iter(TEXTS), 600)
    assert again.definition == trained().definition
    assert trained().vocab_size <= 600
    assert train_bpe(TEXTS[:2], 100_000).vocab_size < 600  # too little text for more
    with pytest.raises(UsageError, match=r"--vocab-size: 200 is too small .expected at least 272"):
        train_bpe(TEXTS, 200)


def test_survives_saving_and_pickling(tmp_path):
    tokenizer = trained()
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.special_tokens == tokenizer.special_tokens
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(TEXTS[5]) == loaded.encode(TEXTS[5])
    assert pickle.loads(pickle.dumps(loaded)).encode(TEXTS[5]) == tokenizer.encode(TEXTS[5])


def test_same_ids_as_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the judge of the ids")
    tokenizer = trained()
    tokenizer.save(tmp_path)
    judge = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*HARD, *TEXTS[:20]]:
        assert judge(text)["input_ids"] == tokenizer.encode(text)
    assert (judge.eos_token_id, judge.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert judge.decode(tokenizer.encode(HARD[3])) == HARD[3]


def test_reads_what_transformers_saves(tmp_path):
    transformers = pytest.importorskip("transformers", reason="writes the other layout")
    trained().save(tmp_path / "ours")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "hf")
    theirs = load_tokenizer(tmp_path / "hf")
    assert theirs.chat_template == trained().chat_template
    assert (theirs.eos_id, theirs.pad_id) == (0, 1)
    assert [theirs.encode(text) for text in HARD] == [trained().encode(text) for text in HARD]


def test_silent_truncation_and_padding_are_off(tmp_path):
    trained().save(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    definition["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == trained().encode(TEXTS[0])


def test_generation_config_adds_stops(tmp_path):
    trained().save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert load_tokenizer(tmp_path).stop_ids == (0, 3, 7)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(UsageError, match=r"no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(BadData, match=r"cannot read tokenizer: .*tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(BadData, match=r"not JSON: .*tokenizer_config.json"):
        load_tokenizer(tmp_path)
